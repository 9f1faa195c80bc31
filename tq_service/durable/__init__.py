"""Durable state: snapshots, checkpoints, the journal of changes, and recovery from all three."""
