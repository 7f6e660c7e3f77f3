"""Wheels of compiled kernels: what is in them, the project that they are built from, and the hook of its builder."""
