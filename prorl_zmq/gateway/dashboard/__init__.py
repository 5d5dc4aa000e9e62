"""The dashboard: a page, served by a gateway, that shows a service, its jobs and finished evaluations."""
