"""Clients of the service for trainers."""
