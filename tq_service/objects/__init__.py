"""Storage of bytes on other nodes through one interface to object stores such as Mooncake Store, S3 and Valkey."""
