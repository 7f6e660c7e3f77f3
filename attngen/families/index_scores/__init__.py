"""Scores of an indexer, by which keys are selected."""
