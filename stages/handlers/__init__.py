"""The tasks that come with the package."""
