"""Management of waiting claims, writes and look-ups, as well as leases and status, on the event loop.

Nothing is persisted.
"""
