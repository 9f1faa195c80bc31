"""The storage engine: stores the bytes of puts under a quota, and reads and frees individual cells."""
