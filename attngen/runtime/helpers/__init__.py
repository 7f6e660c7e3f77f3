"""Kernels beside attention: append to a cache, quantize, widen."""
