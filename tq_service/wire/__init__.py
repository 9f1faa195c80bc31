"""Wire formats: stream frames, columns and objects as bytes, metadata, and the conversion of errors."""
