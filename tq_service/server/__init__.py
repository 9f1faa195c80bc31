"""The gRPC server: setup, servicers, and conversions between protobuf messages and core types."""
