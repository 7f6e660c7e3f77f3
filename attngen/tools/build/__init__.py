"""Building: from a spec to compiled kernels in the cache, and to the files that are committed."""
