"""Selects rows for claims by readiness, groups and order. Uses only numpy, and reads `state` without changing it."""
