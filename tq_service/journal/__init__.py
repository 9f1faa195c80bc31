"""The journal: a group-commit log, files of checksummed records, and encoders for records and columns."""
