"""What crosses sockets: messages, their encoding, and the sockets themselves."""
