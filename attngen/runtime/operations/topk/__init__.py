"""Selection of the largest scores."""
