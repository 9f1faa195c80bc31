"""What the controller knows and decides: partitions, samples, groups, tasks, claims. No grpc, protobuf or torch."""
