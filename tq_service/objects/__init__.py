"""Bytes on other nodes: one interface over existing object stores, such as Mooncake Store, S3 and Valkey."""
