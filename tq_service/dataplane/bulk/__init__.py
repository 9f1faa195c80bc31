"""Bulk transfers: bytes of puts and gets on separate connections, each with a thread, in parallel with gRPC calls."""
