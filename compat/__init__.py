"""Runs other frameworks' programs over their own data plane and over the service and compares them: `make compat`."""
