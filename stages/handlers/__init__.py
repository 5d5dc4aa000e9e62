"""The package's tasks."""
