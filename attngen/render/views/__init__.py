"""Earlier import paths, kept for programs that use them."""
