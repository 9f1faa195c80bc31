"""Copies of puts, as objects in an object store on other nodes."""
