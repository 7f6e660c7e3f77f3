"""Latent attention (MLA) and keys by index on Hopper: values that are columns of the keys."""
