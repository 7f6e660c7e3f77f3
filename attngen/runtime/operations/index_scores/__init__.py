"""Scores of an indexer."""
