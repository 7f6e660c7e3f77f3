"""A built kernel: its manifest, its cubin, and the layout of its parameters."""
