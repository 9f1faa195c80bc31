"""Transports for put and get data between clients and storage services."""
