"""Names of TransferQueue's `utils` that its recipes import."""
