"""The decode step of a layer: the convolution, the rule on a pool of states, and the gated norm."""
