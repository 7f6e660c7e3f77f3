"""Wide."""
