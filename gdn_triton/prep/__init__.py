"""The preparation between the convolution and the delta rule: q, k, v, g and beta."""
