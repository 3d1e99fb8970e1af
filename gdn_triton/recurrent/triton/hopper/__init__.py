"""The Gluon kernel of a step with a window for compute capability 9.0."""
