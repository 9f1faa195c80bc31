"""Wire formats for stream frames, columns, objects, metadata and errors."""
