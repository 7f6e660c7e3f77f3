"""Calls of little work: the suite that races them, and the comparison of the kernel taken with the fastest one."""
