"""The live page, a small web server that shows the state of a service in the browser. It is a client of the service."""
