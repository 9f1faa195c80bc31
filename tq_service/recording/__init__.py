"""Recordings of the batches that a service planned, with the bytes of their samples, for later inspection."""
