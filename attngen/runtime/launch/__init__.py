"""Launches of kernels, prepared once for each kind of call."""
