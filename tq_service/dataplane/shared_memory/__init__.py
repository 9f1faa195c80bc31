"""Shared memory of one host: both halves of the protocol that sends file descriptors over a Unix socket."""
