"""Earlier import paths."""
