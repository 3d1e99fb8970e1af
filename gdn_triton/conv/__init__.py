"""The short convolution, alone or in one pass with the preparation after it."""
