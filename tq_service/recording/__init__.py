"""Recordings: the planned batches of a service with the bytes of their samples, for later inspection."""
