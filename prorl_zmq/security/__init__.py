"""CURVE keys and bearer tokens: who may connect to which socket, and which requests each role may send."""
