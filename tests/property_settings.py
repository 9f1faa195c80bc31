"""How many examples a property is tried with: few in `make test`, more in `make nightly`, many in `make properties`.

The profile of hypothesis says which: `few`, or with `--hypothesis-profile` `nightly` or `many`. Tests give the number
for `make nightly`; `make test` takes a quarter of it, `make properties` fifty times as many. Without a number a
property has 25, 100 and 5,000 examples.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings

_NIGHTLY: Final = 100
_TIMES: Final = {"few": 0.25, "nightly": 1, "many": 50}

# No deadlines: how long an example takes is up to what else the machine does.
for _profile, _times in _TIMES.items():
    settings.register_profile(_profile, settings.default, max_examples=round(_times * _NIGHTLY), deadline=None)
settings.register_profile("many", settings.get_profile("many"), derandomize=False, print_blob=True)
settings.load_profile("few")


def examples(count: int, **others: bool) -> settings:
    """Return settings for `count` examples in `make nightly`, and for fewer or more in other profiles."""
    times = settings.default.max_examples / _NIGHTLY
    if times > 1:
        others["derandomize"] = False  # the same examples as in `make test` would show nothing new
    return settings(max_examples=max(2, round(count * times)), **others)
