"""Controllers that stand in for each other: their log in etcd, which of them leads, and what the others know."""
