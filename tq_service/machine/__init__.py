"""The only writer of `state`: changes, each a dataclass that says what came of a request, and what applies them.

A change says what came of a request, not what was asked: a claim carries its rows, so that applying it needs no sampler
and gives the same answer. The state machine takes them one by one, live and from the log alike.
"""
