"""Comparing kernels with the float64 reference, on a GPU or in Triton's interpreter."""
