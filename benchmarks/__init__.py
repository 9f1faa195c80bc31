"""Programs that measure the service, one file per question; see README.md."""
