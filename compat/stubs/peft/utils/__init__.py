"""A stand-in: see README.md."""
