"""Names that training recipes import from TransferQueue's `utils` package."""
