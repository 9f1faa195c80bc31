"""Which rows a claim may get: what is ready, in which groups and order. Pure numpy: reads `state`, changes nothing."""
