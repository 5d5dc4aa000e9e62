"""What the brokers store on disk."""
