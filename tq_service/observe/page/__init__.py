"""The live page: a small web server, itself a client of the service, that shows the service's state in the browser."""
