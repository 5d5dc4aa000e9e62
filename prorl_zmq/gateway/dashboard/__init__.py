"""The dashboard: a page in the browser that shows a service, its jobs and finished evaluations, served by a gateway."""
