"""Mma backward."""
