"""The Triton backend of a layer's step: its kernel, and its form with a window."""
