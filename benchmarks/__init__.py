"""Programs that measure the service, one file a question; see README.md."""
