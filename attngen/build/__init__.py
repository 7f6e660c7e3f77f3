"""From a spec to built kernels."""
