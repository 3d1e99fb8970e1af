"""The delta rule token by token: whole sequences, and steps of decoding on a pool of states."""
