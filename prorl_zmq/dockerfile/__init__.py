"""Dockerfiles: read, checked, and turned into shell scripts that build them in another container runtime."""
