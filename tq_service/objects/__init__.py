"""Storage of bytes on other nodes: one interface to existing object stores, such as Mooncake Store, S3 and Valkey."""
