"""The Triton backend of the recurrence: a call planned once, and its kernel."""
