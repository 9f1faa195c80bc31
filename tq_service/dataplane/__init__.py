"""How bytes travel between callers that put or get and the storage engine that holds them."""
