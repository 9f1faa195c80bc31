"""Bytes of puts and gets over separate connections with a thread each, in parallel with gRPC calls."""
