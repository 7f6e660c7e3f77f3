"""The plan of a kernel in words and numbers, and which tiles its loops visit."""
