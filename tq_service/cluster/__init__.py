"""Replicated controllers: their log in etcd, leader election, and the progress of standbys."""
