"""Drop-in replacements for other data planes, built on the clients of this package; so far for TransferQueue only."""
