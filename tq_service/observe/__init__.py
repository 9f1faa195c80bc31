"""Prometheus metrics for the service and its clients, and a live web page."""
