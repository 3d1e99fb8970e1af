"""The forward for compute capability 9.0 in Gluon: one kernel with specialized warps."""
