"""What the brokers keep on disk."""
