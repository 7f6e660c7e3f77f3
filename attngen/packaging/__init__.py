"""Wheels of compiled kernels: their contents, the project that they are built from, and the hook of its builder."""
