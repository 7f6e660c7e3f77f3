"""Sizes that follow from shapes: grids, splits, workspaces, predicted times."""
