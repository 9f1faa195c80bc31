"""Observability of the service and its clients: Prometheus metrics, and a live page for the browser."""
