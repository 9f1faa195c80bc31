"""Controller clusters: a replicated log in etcd, leader election, and progress reports from standbys."""
