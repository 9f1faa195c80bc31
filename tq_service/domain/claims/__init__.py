"""Claims: how consumers ask for samples, what they are given, and what becomes of it."""
