"""Recordings: the batches that a service planned, with the bytes of their samples, stored for later inspection."""
