"""Block masks out of lists of blocks."""
