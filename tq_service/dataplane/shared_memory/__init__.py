"""Shared memory on one host: both sides of a protocol that sends file descriptors over a Unix socket."""
