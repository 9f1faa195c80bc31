"""State of the controller: rows, cells, groups, keys, custom_meta, ledgers of tasks. No I/O, no event loop."""
