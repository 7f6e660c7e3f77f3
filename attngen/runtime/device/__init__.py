"""The CUDA driver: modules, streams, TMA descriptors, counters."""
