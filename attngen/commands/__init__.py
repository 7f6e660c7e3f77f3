"""The commands: one module each, which holds a click command named `command`."""
