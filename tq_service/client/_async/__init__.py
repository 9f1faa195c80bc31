"""The async client: source of the sync client, which `scripts/unasync.py` generates."""
