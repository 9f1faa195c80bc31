"""How many examples a property is tried with: few in `make test`, many in `make properties`.

A profile of hypothesis says which: `few`, or with `--hypothesis-profile many` fifty times as many. A property without
a count of its own has 100 and 5,000.
"""

from __future__ import annotations

from hypothesis import settings

_FEW, _TIMES = 100, 50

# No deadlines: how long an example takes is up to what else the machine does.
settings.register_profile("few", settings.default, max_examples=_FEW, deadline=None)
settings.register_profile("many", max_examples=_TIMES * _FEW, deadline=None, derandomize=False, print_blob=True)
settings.load_profile("few")


def examples(count: int, **others: bool) -> settings:
    """Return settings for `count` examples, or for as many times more as the profile says."""
    times = settings.default.max_examples // _FEW
    if times > 1:
        others["derandomize"] = False  # those of `make test` again would show nothing new
    return settings(max_examples=count * times, **others)
