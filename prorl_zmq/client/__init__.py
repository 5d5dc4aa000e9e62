"""A trainer's clients of the service."""
