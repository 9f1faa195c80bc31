"""Transports that carry the bytes of puts and gets between clients and the storage engine."""
