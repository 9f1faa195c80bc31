"""A stand-in: see README.md."""

__version__ = "0"

init_empty_weights = None
