"""The backend broker: inference backends and their assignments to jobs."""
