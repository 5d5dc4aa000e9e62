"""The state of a service and all its brokers, kept up to date for viewers (see `watcher`)."""
