"""The functions that programs call, their dispatch, and their operators of ``torch.library``."""
