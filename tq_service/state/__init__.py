"""State of the controller (rows, cells, groups, keys, custom_meta, task ledgers), without I/O or an event loop."""
