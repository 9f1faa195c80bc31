"""Drop-in replacements for other data planes, built on this package's clients; so far only for TransferQueue."""
