"""Transports that carry the data of puts and gets between clients and storage services."""
