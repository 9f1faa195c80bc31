"""Copies of puts, stored as objects in an object store on other nodes."""
