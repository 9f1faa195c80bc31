"""The only writer of `state`: the changes, each a dataclass with the result of a request, and the state machine.

A change contains the result of a request rather than the request itself. For example, a claim contains its rows, so
applying it needs no sampler and always returns the same answer. The state machine applies changes one by one, both live
ones and those read from the log.
"""
