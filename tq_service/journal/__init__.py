"""The journal: a log with group commit, files of checksummed records, and the encoding of records and columns."""
