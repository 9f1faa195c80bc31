"""The gRPC server: setup, thin servicers, and conversion between protobuf messages and the core's types."""
