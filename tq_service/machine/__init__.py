"""Changes to the controller's state, and the state machine that applies them.

No other package modifies `state`. A change is a dataclass that contains the result of a request rather than the request
itself. For example, a claim contains the claimed rows, so applying it calls no sampler and always gives the same
result. The state machine applies one change at a time, whether the change is new or read from the log.
"""
