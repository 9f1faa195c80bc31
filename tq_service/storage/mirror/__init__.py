"""Puts a second time, as objects of an engine on other nodes."""
