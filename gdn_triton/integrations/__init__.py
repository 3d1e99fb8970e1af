"""Other programs' calling conventions and hooks. Nothing here is imported until it is asked for."""
