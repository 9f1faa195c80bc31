"""Wire formats: frames of the bulk streams, layouts and objects as bytes, metadata, and the table of errors."""
