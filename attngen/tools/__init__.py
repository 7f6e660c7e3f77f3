"""What the commands do, as functions that return values: building, verifying, measuring, packaging."""
