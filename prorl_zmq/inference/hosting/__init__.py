"""The engine host: serves one engine over ZeroMQ and registers it with the backend broker."""
