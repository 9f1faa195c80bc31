"""The lower layer: stores for the bytes of puts."""
