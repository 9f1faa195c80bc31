"""A stand-in: see README.md."""

__version__ = "0"

FastAPI = Request = None
