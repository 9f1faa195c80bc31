"""Durable state: the journal of changes, snapshots, checkpoints, and recovery from them."""
