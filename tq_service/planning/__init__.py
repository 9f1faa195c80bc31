"""The selection of rows for claims: ready rows, their groups and order. Pure numpy: reads `state`, changes nothing."""
