"""A product with a weight of each channel."""
