"""Append."""
