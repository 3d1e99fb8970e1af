"""What the operators share on the host. Private."""
