"""The HTTP APIs of the model proxy, one module each. All objects here are stateless."""
