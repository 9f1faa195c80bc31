"""The storage engine: the bytes of puts in memory, under a quota, read and freed by cells."""
