"""Forward passes on Hopper with head dimensions above 256."""
