"""Starts and supervises the processes of a service, and examines the machine they run on."""
