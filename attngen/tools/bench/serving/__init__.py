"""Decoding, appending and prefill over caches: replays of CUDA graphs, beside libraries that serve."""
