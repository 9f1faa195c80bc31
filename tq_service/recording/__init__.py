"""Recordings of planned batches, including the bytes of their samples, for later inspection."""
