"""Names that recipes import from TransferQueue's `utils`."""
