"""Quantizing to 8 bits."""
