"""Prometheus metrics for the service and its clients, and a live page for the browser."""
