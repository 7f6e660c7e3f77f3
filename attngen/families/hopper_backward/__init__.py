"""Backward passes on Hopper, by single blocks and by clusters."""
