"""Views that fill the templates of each schedule: one module for each, under its name."""
