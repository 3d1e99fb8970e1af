"""A layer's decode step: the convolution, the rule on a pool of states, and the gated norm."""
