"""Bulk transfers of the bytes of puts and gets, over separate connections with one thread each, beside gRPC calls."""
