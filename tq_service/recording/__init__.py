"""Recordings: a service's planned batches, with the bytes of their samples, for later inspection."""
