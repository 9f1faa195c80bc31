"""How bytes travel between those who put or get and the storage engine that holds them."""
