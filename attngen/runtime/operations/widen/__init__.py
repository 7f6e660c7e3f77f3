"""Widening a cache of 8 bits to 16 for a call."""
