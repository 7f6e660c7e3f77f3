"""Appending keys and values to a cache."""
