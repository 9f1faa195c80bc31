"""Keys and groups of a write, looked through before the one step that makes the write.

What is found out here holds whatever the state of the partition: whether keys are unique, and which group each sample
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.state.plan import Indexes
from tq_service.texts import Texts

LARGE: Final = 1 << 15  # names from which on a write is worth looking through beforehand


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The groups that samples name.

    Attributes:
        names: each group once.
        codes: for each sample `(n,)` the position of its group in `names`, -1 for none.
    """

    names: Sequence[str]
    codes: Indexes

    @classmethod
    def of(cls, groups: Sequence[str]) -> GroupNames:
        """Return the groups of some samples, "" for none."""
        if isinstance(groups, Texts) and groups.order.are_distinct and groups.sizes.all():
            return cls(names=Texts(groups.utf8, groups.sizes), codes=groups.codes)  # neighbours only are alike
        code_of = {"": -1}
        distinct = groups.distinct() if isinstance(groups, Texts) else groups
        codes = np.array([code_of.setdefault(name, len(code_of) - 1) for name in distinct], np.int64)
        return cls(names=list(code_of)[1:], codes=codes[groups.codes] if isinstance(groups, Texts) else codes)

    def counts(self) -> Indexes:
        """Return how many samples name each group `(groups,)`."""
        return np.bincount(self.codes + 1, minlength=len(self.names) + 1)[1:]

    def at(self, positions: Indexes) -> list[str]:
        """Return the groups of samples at some positions, "" for none."""
        names = [*self.names, ""]
        return [names[code] for code in self.codes[positions].tolist()]

    def of_samples(self, which: slice | NDArray[np.bool_]) -> GroupNames:
        """Return the groups of some of the samples; groups that none of them names stay."""
        return GroupNames(names=self.names, codes=self.codes[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a write.

    Attributes:
        keys: in the order of the samples; None: none.
        are_keys_unique: whether each is there once and none is empty.
        groups: in the order of the samples; None: none.
        group_names: these groups.
        longest_key: characters of it.
        longest_group: characters of it.
    """

    keys: Texts | None
    are_keys_unique: bool
    groups: Texts | None
    group_names: GroupNames | None
    longest_key: int
    longest_group: int


def look_through(keys: Sequence[str], groups: Sequence[str]) -> Names:
    """Look names through."""
    keys, groups = (each if isinstance(each, Texts) else Texts.of(each) for each in (keys, groups))
    return Names(
        keys=keys if len(keys) else None,
        are_keys_unique=_are_unique(keys),
        groups=groups if len(groups) else None,
        group_names=GroupNames.of(groups) if len(groups) else None,
        longest_key=keys.longest,
        longest_group=groups.longest,
    )


def _are_unique(keys: Texts) -> bool:
    """Return whether each key is there once and none is empty."""
    if not keys.sizes.all() or len(keys) != keys.sizes.size:
        return False
    return keys.order.are_distinct or len(set(keys)) == len(keys)
