"""Other frameworks' own programs over their own data plane and over the service, and what differs: `make compat`."""
