"""The layer between gRPC and the servicers: the table of methods and the middleware."""
