"""The lower layer of the storage engine: stores for the bytes of puts."""
