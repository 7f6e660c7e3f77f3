"""Merging results over two sets of keys."""
