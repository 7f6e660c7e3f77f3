"""A call's arguments: as given, checked, and as cache keys."""
