"""Backward passes by mma.sync, from sm80 on."""
