"""Backward passes of latent attention and of keys by index."""
