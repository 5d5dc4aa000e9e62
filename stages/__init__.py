"""Stage processes, the agent loop, and the task handlers."""
