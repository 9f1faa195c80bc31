"""Selection of rows for claims by readiness, group and order. This package only reads `state`, and uses only numpy."""
