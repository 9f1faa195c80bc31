"""The layer between gRPC and the servicers: a table of methods, and middleware for all calls."""
