"""The storage engine, which stores the bytes of puts under a quota and reads and frees individual cells."""
