"""Benchmarks of the kernels of a spec beside the attention libraries that are installed, and beside one another."""
