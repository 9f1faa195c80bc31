"""The journal: a log with group commit, files of checked records, and the bytes of records and columns."""
