"""The HTTP APIs that the model proxy speaks, a module each; all objects here are without state."""
