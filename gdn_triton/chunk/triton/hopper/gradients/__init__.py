"""The gradients of single chunks, for compute capability 9.0, in Gluon: one kernel whose warps have
roles."""
