"""The lower layer of the storage engine: blob stores, which contain the bytes of puts."""
