"""Bytes of puts and gets over connections of their own, each with a thread, beside the calls of gRPC."""
