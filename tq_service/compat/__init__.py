"""Places of other data planes, taken by packages of their names over the clients: TransferQueue's."""
