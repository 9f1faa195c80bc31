"""Adapters for trainer frameworks. Each adapter imports its framework, which must be installed separately."""
