"""Decoding, appending and prefill over caches: replays of CUDA graphs, next to serving libraries."""
