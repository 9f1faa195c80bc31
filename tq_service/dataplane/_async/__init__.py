"""The asyncio form, from which `scripts/unasync.py` makes the sync one."""
