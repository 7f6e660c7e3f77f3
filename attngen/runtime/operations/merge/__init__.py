"""Merging partial results by their log-sum-exp."""
