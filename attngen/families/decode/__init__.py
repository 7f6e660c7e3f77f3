"""Decoding with split KV: on Hopper, and by mma.sync."""
