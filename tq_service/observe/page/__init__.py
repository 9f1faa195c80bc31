"""The live page: a small web server that reads a service as its client and shows the service's state in browsers."""
