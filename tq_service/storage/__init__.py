"""The storage engine: keeps the bytes of puts in memory under a quota; cells are read and freed individually."""
