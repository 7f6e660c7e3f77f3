"""Racing the kernels of a spec against the attention libraries that are installed, and against one another."""
