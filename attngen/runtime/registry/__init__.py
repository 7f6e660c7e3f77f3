"""Known packages and kernels, and the choice of one for a call."""
