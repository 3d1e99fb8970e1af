"""Host code that all operators share. Private."""
