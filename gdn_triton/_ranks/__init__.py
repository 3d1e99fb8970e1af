"""The split of a call's tokens over the ranks of a process group, and the exchange between
ranks."""
