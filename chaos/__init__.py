"""Kills the service and its clients at random under load, and checks its guarantees against a plain model."""
