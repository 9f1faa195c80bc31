"""A stand-in: see README.md."""

__version__ = "0"


class Dataset:
    """A name for annotations."""
