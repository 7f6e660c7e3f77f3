"""What the commands do, as functions that return values: building, racing, verifying, explaining."""
