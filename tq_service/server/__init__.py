"""The gRPC server: wiring, thin servicers, and the converters between protobuf and the core."""
