"""A stand-in: see README.md."""


class Server:
    """A base class."""


class Config:
    """A name for annotations."""
