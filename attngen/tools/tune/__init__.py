"""The fastest tile, stages and warps of each kernel of a spec on the card that is here, by measuring them."""
