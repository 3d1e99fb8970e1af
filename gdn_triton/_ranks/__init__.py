"""How the tokens of a call are split over the ranks of a process group, and what ranks exchange."""
