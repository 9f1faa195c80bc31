"""Transports for the bytes of puts and gets between clients and storage services."""
