"""Attention in plain torch, on any device."""
