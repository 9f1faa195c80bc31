"""The live page: a small web server that reads the service's state as a client and shows it in the browser."""
