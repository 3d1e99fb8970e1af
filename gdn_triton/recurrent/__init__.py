"""The delta rule token by token: for whole sequences, and for decode steps on a pool of states."""
