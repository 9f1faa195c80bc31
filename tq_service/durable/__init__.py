"""What outlives a process: the journal of changes, snapshots, checkpoints, and recovery from them."""
