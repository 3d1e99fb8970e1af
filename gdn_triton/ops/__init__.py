"""Host code of each backend: a validated problem and its tensors in, output and state out."""
