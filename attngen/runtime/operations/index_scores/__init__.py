"""Index scores."""
