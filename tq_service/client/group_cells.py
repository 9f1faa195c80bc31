"""Fields shared by the samples of a group. Each value is read once and returned for all samples of the group.

locations of n samples --> SharedRows: m distinct cells, and the cell of each sample
    --> m rows are read --> expand: n rows, sharing memory if possible
                        --> or the m rows, and `group_index` (n,)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tq_service.client.batch_meta import BatchMeta
from tq_service.client.reads import RowPattern, StorageRead, plan_reads
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldScope, FieldSpec
from tq_service.wire.columns import has_torch
from tq_service.wire.metadata import Indexes

if TYPE_CHECKING:
    import torch

    from tq_service.client.landing import Landing

GROUP_INDEX: Final = "group_index"
"""Name of the field that `get_data(expand=False)` adds to map each sample to its row in group-scope columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRows:
    """The distinct rows of the group-scope fields in a batch.

    Attributes:
        names: names of the group-scope fields.
        first: for each distinct row, in order, the index of the first sample that uses it; an array of shape `(m,)`.
        order: for each sample, the index of the distinct row that it uses; an array of shape `(n,)`.
    """

    names: frozenset[str]
    first: Indexes
    order: Indexes

    @classmethod
    def of(cls, located: BatchMeta, fields: Sequence[FieldSpec]) -> SharedRows:
        """Return the shared rows of a batch. At least one of `fields` must have group scope."""
        shared = [spec.name for spec in fields if spec.scope is FieldScope.GROUP]
        # All fields have rows for the same groups. A group has two rows if its field was put between two look-ups.
        order = np.zeros(located.size, np.int64)
        for runs in located.locations.select_fields(shared).runs:
            puts, rows = runs.expand()
            for each in (puts, rows):
                distinct, codes = np.unique(each, return_inverse=True)
                _, order = np.unique(order * distinct.size + codes, return_inverse=True)
        _, first, order = np.unique(order, return_index=True, return_inverse=True)
        by_place = np.argsort(first)
        place_of = np.empty_like(by_place)
        place_of[by_place] = np.arange(by_place.size)
        return cls(names=frozenset(shared), first=first[by_place], order=place_of[order])

    @classmethod
    def of_none(cls, fields: Sequence[FieldSpec]) -> SharedRows:
        """Return the `SharedRows` of an empty batch; see `of`."""
        names = frozenset(spec.name for spec in fields if spec.scope is FieldScope.GROUP)
        return cls(names=names, first=np.zeros(0, np.int64), order=np.zeros(0, np.int64))

    def plan_reads(self, located: BatchMeta) -> list[StorageRead]:
        """Return reads that fetch each distinct row exactly once."""
        names = [spec.name for spec in located.fields if spec.name in self.names]
        reads = plan_reads(located.locations.select_fields(names).select(self.first), names)
        return [replace(read, owners=self.first[read.positions], order=self.order) for read in reads]

    @property
    def is_in_order(self) -> bool:
        """Whether each sample has its own row and the rows are in the same order as the samples."""
        return self.order.size == self.first.size and bool((self.order == np.arange(self.order.size)).all())

    def expanded(self, data: dict[str, Any]) -> dict[str, Any]:
        """Repeat the rows of group-scope fields for each sample, and return the resulting columns."""
        if self.is_in_order:
            return data
        patterns: dict[int, RowPattern] = {}
        shared = {name: self._expand(values, patterns) for name, values in data.items() if name in self.names}
        return {**data, **shared}

    def indexed(self, data: dict[str, Any], device: Any = None) -> dict[str, Any]:
        """Return the decoded columns with an added field `group_index`, which maps each sample to its row."""
        if not has_torch():
            return {**data, GROUP_INDEX: self.order}
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        return {**data, GROUP_INDEX: torch.from_numpy(self.order).to(device)}

    def _expand(self, values: Any, patterns: dict[int, RowPattern]) -> Any:
        """Return one row per sample. Rows of a list are shared, and rows of a tensor are views or copies."""
        count = self.order.size
        if isinstance(values, list):
            return [values[row] for row in self.order.tolist()]
        if isinstance(values, np.ndarray):
            return values[self.order]
        if values.is_nested:
            return self._expand_nested(values, patterns)
        if self.first.size == 1:
            return values.expand(count, *values.shape[1:])
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        order = torch.from_numpy(self.order).to(values.device)
        return _as_integers(values).index_select(0, order).view(values.dtype)

    def _expand_nested(self, nested: Any, patterns: dict[int, RowPattern]) -> torch.Tensor:
        """Copy the rows of a nested tensor for each sample, because torch does not support overlapping rows."""
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        values, offsets, dim = nested.values(), nested.offsets(), nested._ragged_idx - 1  # no public attribute
        bounds = RowPattern.of_offsets(offsets).bounds
        starts, lengths = bounds[:-1][self.order], np.diff(bounds)[self.order]
        if id(offsets) not in patterns:
            patterns[id(offsets)] = RowPattern.of_lengths(lengths, dtype=offsets.dtype, beside=offsets)
        integers = _as_integers(values)
        parts = [integers.narrow(dim, *each) for each in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return patterns[id(offsets)].nested(torch.cat(parts, dim=dim).view(values.dtype), dim + 1)


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same size, since some torch operations do not support dtypes such as float8."""
    import torch  # noqa: PLC0415  (torch is optional and slow to import)

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(sizes.get(values.dtype.itemsize, values.dtype))


def arrangement(
    shared: SharedRows, order: Indexes | None, landing: Landing | None, *, expand: bool
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that arranges the decoded columns of a batch according to `expand`.

    Args:
        shared: which rows of the group-scope fields the distinct samples of the batch use.
        order: for each sample in the batch, its index among the distinct samples, as an array of shape `(n,)`. None if
            no sample is repeated.
        landing: destinations of the fields, or None to place the fields in new host memory.
        expand: the `expand` argument of `get_data`.
    """
    if order is not None:
        shared = replace(shared, order=shared.order[order])
    return shared.expanded if expand else partial(shared.indexed, device=None if landing is None else landing.device)


def check_not_expanded(fields: Sequence[FieldSpec], landing: Landing | None) -> None:
    """Check that the arguments of `get_data` can be combined with `expand=False`.

    Raises:
        InvalidArgumentError: a fetched field is named `group_index`, or `out` contains a field with group scope.
    """
    for spec in fields:
        if spec.name == GROUP_INDEX:
            raise InvalidArgumentError(
                f"expand is False and field {GROUP_INDEX!r} is fetched, but expand=False adds a field with the same "
                f"name. Omit this field from data_fields",
                field="expand",
            )
        if spec.scope is FieldScope.GROUP and landing is not None and spec.name in landing.out:
            raise InvalidArgumentError(
                f"out contains field {spec.name!r}, but with expand=False the field's number of rows is not known in "
                "advance. Omit the field from out",
                field="out",
                metadata={"field_name": spec.name},
            )
