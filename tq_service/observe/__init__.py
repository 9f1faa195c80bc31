"""Observability of a service and its clients: Prometheus metrics, and the live page for people."""
