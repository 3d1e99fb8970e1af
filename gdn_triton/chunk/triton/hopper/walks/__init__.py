"""The serial walks of the backward for compute capability 9.0 in Gluon."""
