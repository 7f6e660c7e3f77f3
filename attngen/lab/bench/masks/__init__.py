"""Masks and scores of models and papers, beside compiled FlexAttention."""
