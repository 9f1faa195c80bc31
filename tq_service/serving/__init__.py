"""Serves the calls that wait: claims, writes, look-ups; leases and status. On the event loop; dies with the process."""
