"""The gRPC server, with its setup, its servicers, and conversions between protobuf messages and core types."""
