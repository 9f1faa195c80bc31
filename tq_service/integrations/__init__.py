"""Adapters for trainer frameworks. Each imports its framework, which must be installed separately."""
