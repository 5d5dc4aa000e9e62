"""vLLM in the engine host's process."""
