"""Serves waiting calls (claims, writes, look-ups), leases and status. Runs on the event loop; ends with the process."""
