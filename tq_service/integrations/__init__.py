"""Adapters by which trainer frameworks use the service; each imports its framework, which it does not install."""
