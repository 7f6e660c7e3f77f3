"""Mma forward."""
