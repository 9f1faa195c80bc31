"""Selects rows for claims: ready rows, their groups and their order. Pure numpy; reads `state` but never changes it."""
