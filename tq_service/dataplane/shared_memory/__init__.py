"""Shared memory on one host: client and server side of a protocol that sends file descriptors over a Unix socket."""
