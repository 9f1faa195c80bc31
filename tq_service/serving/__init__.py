"""Serves waiting calls (claims, writes, look-ups), leases and status on the event loop, without persisting anything."""
