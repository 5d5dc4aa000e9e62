"""Start and supervise the processes of a service, and examine the machine they run on."""
