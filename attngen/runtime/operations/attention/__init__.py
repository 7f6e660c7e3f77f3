"""Attention: the public functions, dispatch, and operators of ``torch.library``."""
