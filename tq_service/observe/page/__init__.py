"""The live page: a small web server that is a client of the service, and shows it to any number of browsers."""
