"""Search for the fastest tile, stages and warps."""
