"""The async client, from which `scripts/unasync.py` generates the sync client."""
