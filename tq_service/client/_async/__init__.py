"""The async client: the source that `scripts/unasync.py` makes the sync one of."""
