"""Kills the service and its clients at random while they work, and checks what was promised against a plain model."""
