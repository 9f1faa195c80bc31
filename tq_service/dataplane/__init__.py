"""Transports for bytes between callers that put or get and the storage engine."""
