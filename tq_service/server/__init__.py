"""The gRPC server: wiring, thin servicers, and conversion between protobuf messages and the core's types."""
