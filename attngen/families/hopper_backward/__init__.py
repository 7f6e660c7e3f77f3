"""Hopper backward."""
