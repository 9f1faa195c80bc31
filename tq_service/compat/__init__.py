"""Drop-in replacements of other data planes, built on the clients: TransferQueue."""
