"""The journal: a log with group commit, files of checksummed records, and encoders for records and columns."""
