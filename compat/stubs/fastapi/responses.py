"""A stand-in: see README.md."""

JSONResponse = None
