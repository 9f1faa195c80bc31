"""The layer between gRPC and the servicers, with the table of methods and the middleware."""
