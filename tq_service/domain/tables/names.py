"""Keys and groups of a write, looked through a few thousand at a time before the one step that makes the write.

What is found out here holds whatever the state of the partition: whether keys are unique, and which group each sample
names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Indexes

LARGE: Final = 1 << 15  # names from which on a write is worth looking through beforehand
_STEP: Final = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The groups that samples name.

    Attributes:
        names: each group once.
        codes: for each sample `(n,)` the position of its group in `names`, -1 for none.
    """

    names: list[str]
    codes: Indexes

    @classmethod
    def of(cls, groups: Sequence[str]) -> GroupNames:
        """Return the groups of a few samples, "" for none."""
        code_of = {"": -1}
        codes = [code_of.setdefault(name, len(code_of) - 1) for name in groups]
        return cls(names=list(code_of)[1:], codes=np.array(codes, np.int64))

    def counts(self) -> Indexes:
        """Return how many samples name each group `(groups,)`."""
        return np.bincount(self.codes + 1, minlength=len(self.names) + 1)[1:]

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

    keys: list[str] | None
    are_keys_unique: bool
    groups: list[str] | None
    group_names: GroupNames | None
    longest_key: int
    longest_group: int


def look_through(keys: Sequence[str], groups: Sequence[str]) -> Generator[None, None, Names]:
    """Look names through; yields after every few thousand, so that others have their turn."""
    all_keys: list[str] = []
    unique_keys: set[str] = set()
    longest_key = 0
    for start in range(0, len(keys), _STEP):
        some = list(keys[start : start + _STEP])
        all_keys += some
        unique_keys.update(some)
        longest_key = max(longest_key, *map(len, some))
        yield
    all_groups: list[str] = []
    code_of = {"": -1}
    codes = np.empty(len(groups), np.int64)
    for start in range(0, len(groups), _STEP):
        some = list(groups[start : start + _STEP])
        all_groups += some
        codes[start : start + len(some)] = _codes(some, code_of)
        yield
    group_names = GroupNames(names=list(code_of)[1:], codes=codes)
    return Names(
        keys=all_keys or None,
        are_keys_unique=len(unique_keys) == len(all_keys) and "" not in unique_keys,
        groups=all_groups or None,
        group_names=group_names if all_groups else None,
        longest_key=longest_key,
        longest_group=max(map(len, group_names.names), default=0),
    )


async def look_through_in_turns(keys: Sequence[str], groups: Sequence[str]) -> Names:
    """Look names through, while others have their turns."""
    looking = look_through(keys, groups)
    while True:
        try:
            next(looking)
        except StopIteration as done:
            names: Names = done.value
            return names
        await asyncio.sleep(0)


def _codes(names: list[str], code_of: dict[str, int]) -> Indexes:
    """Return the code of each name; neighbours are mostly alike."""
    values = np.array(names, object)
    heads = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    codes = [code_of.setdefault(name, len(code_of) - 1) for name in values[heads].tolist()]
    return np.repeat(np.array(codes, np.int64), np.diff(heads, append=values.size))
