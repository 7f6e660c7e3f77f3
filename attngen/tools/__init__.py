"""The work of the commands, as functions that return values: build, explain, verify, bench, tune."""
