"""The upper layer: the puts with their rows and columns, the quota, and confirmations."""
