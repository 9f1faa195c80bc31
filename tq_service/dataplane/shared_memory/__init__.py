"""Shared memory on a single host: the client and server sides of a protocol that sends file descriptors."""
