"""Generated from protos/ by scripts/generate.sh; not written by hand."""
