"""Changes to the controller's state, and the state machine that applies them; no other package modifies `state`.

A change is a dataclass that contains the result of a request rather than the request itself. For example, a claim
contains its rows, so applying the claim calls no sampler and always has the same result. The state machine applies
changes one by one, whether they are new or read from the log.
"""
