"""Drop-in replacements for other data planes, built on this package's clients. Supports only TransferQueue so far."""
