"""The upper layer of the storage engine: puts with their rows and columns, the quota, and confirmations."""
