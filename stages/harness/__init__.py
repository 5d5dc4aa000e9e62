"""Agent harnesses: how each is installed, and how it is run in a sandbox against a model that answers over HTTP."""
