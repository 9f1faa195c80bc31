"""Bytes on other nodes: one interface over engines that exist, such as Mooncake Store, S3 and Valkey."""
