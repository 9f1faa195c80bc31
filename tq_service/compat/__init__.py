"""Drop-in replacements for other data planes, built on tq_service's clients. Only TransferQueue is supported so far."""
