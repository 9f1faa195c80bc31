"""Drop-in replacements for other data planes, built on the clients; so far TransferQueue."""
