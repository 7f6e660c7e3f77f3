"""Calls of little work: the suite that times them, and the comparison of the kernel taken with the fastest one."""
