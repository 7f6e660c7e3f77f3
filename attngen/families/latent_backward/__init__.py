"""Latent backward."""
