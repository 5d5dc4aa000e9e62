"""The relay of weights between a trainer and engine hosts that share no disk."""
