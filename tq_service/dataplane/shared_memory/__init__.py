"""Shared memory on a single host: the client and server sides of a protocol that passes file descriptors."""
