"""Bulk transfers, which send put and get data over separate connections with one thread each, alongside gRPC calls."""
