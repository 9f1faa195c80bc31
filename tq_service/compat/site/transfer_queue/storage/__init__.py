"""What callers import from TransferQueue's storage: the service stores, so nothing of it is to be configured."""
