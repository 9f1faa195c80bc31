"""The live page: a small web server that reads the service as a client and shows it to any number of browsers."""
