"""The only writer of `state`: changes, each a dataclass with the result of a request, and the state machine.

A change holds the result, not the request. For example, a claim carries its rows, so applying it needs no sampler and
always gives the same answer. The state machine applies changes one by one, both live ones and those read from the log.
"""
