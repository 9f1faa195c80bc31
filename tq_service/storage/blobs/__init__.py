"""The lower floor: where the bytes of puts are."""
