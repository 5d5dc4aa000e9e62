"""Keys, and who may connect to which door and ask for what."""
