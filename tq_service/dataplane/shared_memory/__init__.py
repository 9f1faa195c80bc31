"""Shared memory on one host: both sides of the protocol that sends file descriptors over a Unix socket."""
