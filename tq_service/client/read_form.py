"""Options that determine the form of fetched data: row slices, layout and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tq_service.client.padding import PaddedColumn, Padding
from tq_service.client.slices import RowSlice, Slices
from tq_service.dataplane.receiving import Received
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldScope, FieldSpec, Layout, ReadLayout
from tq_service.wire.columns import ColumnShape, ScatteredRows
from tq_service.wire.mapping import Bytes
from tq_service.wire.metadata import Indexes
from tq_service.wire.slices import RowCut

if TYPE_CHECKING:
    from tq_service.client.landing import Landing
    from tq_service.client.reads import StorageRead


@dataclass(frozen=True, slots=True)
class ReadForm:
    """The row slices and padding requested by a call.

    Attributes:
        slices: the row slices. If None, full rows of all fields are fetched.
        padding: padding options, or None for no padding.
    """

    slices: Slices | None
    padding: Padding | None

    @classmethod
    def of(cls, slices: Slices | None, padding: Padding | None, layout: ReadLayout | None) -> ReadForm:
        """Return the `ReadForm` for the options of a `get_data` call.

        Raises:
            InvalidArgumentError: fields are requested as both jagged and padded.
        """
        if padding is not None and layout == "jagged":
            raise InvalidArgumentError(
                "layout is 'jagged' and padded is set; expected only one of them, because a padded field is dense",
                field="layout",
            )
        return cls(slices, padding)

    def check_rows_stay(self) -> None:
        """Check that the slices allow samples to be omitted from the result.

        Raises:
            InvalidArgumentError: slices are set per row. If a sample were omitted, the slices would apply to the wrong
                rows.
        """
        if self.slices is not None and self.slices.is_by_row:
            raise InvalidArgumentError(
                "missing is 'skip', but slices are set for each row, and skipping samples would shift the ranges. "
                "Look up the samples first, or set missing='error'",
                field="missing",
            )

    def _check_own(self, shared: Sequence[str]) -> None:
        named = [] if self.slices is None else list(self.slices.given)
        for option, names in (("slices", named), ("padded", (self.padding and self.padding.fields) or ())):
            found = [name for name in names if name in shared]
            if found:
                raise InvalidArgumentError(
                    f"{option} has field {found[0]!r}, whose values are shared by groups; expected fields with one "
                    f"row per sample. Omit the field to fetch its full rows",
                    field=option,
                    metadata={"field_name": found[0]},
                )

    def of_fields(self, specs: Sequence[FieldSpec]) -> FormOfFields:
        """Apply the options to the fetched fields, and return the resulting form.

        Raises:
            InvalidArgumentError: an option applies to a field that is not fetched, cannot be sliced, or is shared by
                groups.
            FieldMismatchError: a field cannot be padded.
        """
        slices, padding, names = self.slices, self.padding, [spec.name for spec in specs]
        positions: list[FieldSpec] = []
        self._check_own([spec.name for spec in specs if spec.scope is FieldScope.GROUP])
        if slices is not None:
            slices.check(names)
            positions = slices.position_specs(specs)
        if padding is not None:
            padding.check([*names, *(spec.name for spec in positions)])
            heads = padding.heads(specs, [] if slices is None else list(slices.cuts))
            if heads:
                slices = (slices or Slices({}, {})).with_heads(heads)
        cut = {spec.name: spec if slices is None else slices.cut_spec(spec) for spec in specs}
        result = list(cut.values())
        if slices is not None:
            result += slices.position_specs(result)
        return FormOfFields(
            slices=slices,
            padding=padding,
            cut=cut,
            result=result if padding is None else padding.specs(result),
            padded=[] if padding is None else [spec.name for spec in specs if padding.pads(spec)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOfFields:
    """The options of a `ReadForm`, resolved for the fetched fields.

    Attributes:
        slices: the requested slices, and the slices that implement `truncate`. If None, full rows of all fields are
            fetched.
        padding: padding options, or None for no padding.
        cut: specs of the fields by name, after slicing and before padding.
        result: specs of the fields in the result, to the extent that they are known before the read.
        padded: names of the padded fields that are known before the read.
    """

    slices: Slices | None
    padding: Padding | None
    cut: Mapping[str, FieldSpec]
    result: Sequence[FieldSpec]
    padded: Sequence[str]

    @property
    def cuts(self) -> Mapping[str, RowCut]:
        """A dict that maps fields to their requested slices."""
        return {} if self.slices is None else self.slices.cuts

    @property
    def is_by_row(self) -> bool:
        """Whether slices are set per row."""
        return self.slices is not None and self.slices.is_by_row

    def begin(self, reads: Sequence[StorageRead], row_count: int, landing: Landing | None) -> PaddedRead | None:
        """Return the padding state for reads that cover the result's rows in order, or None if no field is padded."""
        if self.padding is None:
            return None
        # The following fields cannot be padded while they are received: fields whose extents the client joins, and
        # fields with fill values or positions.
        later = {name for read in reads if read.has_extents for name in read.field_names}
        if self.slices is not None:
            later |= {name for name, each in self.slices.given.items() if each.fill is not None or each.positions}
        device = None if landing is None else landing.device
        counts = Counter(name for read in reads for name in read.field_names)
        return PaddedRead(
            padding=self.padding,
            row_count=row_count,
            device=device,
            specs=self.cut,
            columns={
                name: PaddedColumn(self.padding, self.cut[name], row_count, device, is_one_answer=counts[name] == 1)
                for name in self.padded
                if name in counts and name not in later
            },
        )

    def finish(self, received: Sequence[Received], wanted: Sequence[str], padded: PaddedRead | None) -> list[Received]:
        """Return all columns: first those in `wanted`, in the same order, then position columns, then masks."""
        columns = list(received) if self.slices is None else self.slices.finish(received)
        return columns if padded is None else padded.finish(columns, wanted)


_OPTIONS: Final = ("slices", "padded", "pad_value", "length", "side", "mask", "truncate")
CP_POSITIONS: Final = "cp_positions"
"""Name of the field that contains the positions of the items in a context-parallel rank's share."""


def check_read_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check `get_data` arguments that will be used with many batches, and return the arguments.

    Raises:
        InvalidArgumentError: an argument is invalid, or cannot be used with many batches.
    """
    found = dict(options or {})
    others = [name for name in found if name not in _OPTIONS]
    if others:
        raise InvalidArgumentError(
            f"read_options contains {others[0]!r}; expected only {', '.join(_OPTIONS)}", field="read_options"
        )
    Padding.of(found.get("padded", False), **{name: found[name] for name in _OPTIONS[2:] if name in found})
    slices = Slices.of(found.get("slices"), 0)
    by_row = [] if slices is None else [name for name, each in slices.given.items() if each.by_row is not None]
    if by_row:
        raise InvalidArgumentError(
            f"read_options has one slice per row of field {by_row[0]!r}; expected the same slice for all rows, because "
            "every batch has different rows",
            field="read_options",
        )
    return found


def with_shares(
    options: Mapping[str, Any],
    data_fields: Sequence[str],
    cp_fields: Sequence[str],
    share: RowSlice,
    fill: Any,
    *,
    positions: bool,
) -> dict[str, Any]:
    """Extend `get_data` arguments so that fields are sliced to a context-parallel rank's share.

    Args:
        options: `get_data` arguments to extend.
        data_fields: names of the fetched fields.
        cp_fields: names of the fields that are split among the ranks.
        share: slice that selects this rank's items in each row.
        fill: fill value of the shares, or a dict that maps fields to fill values.
        positions: whether to add a field that contains the positions of the items in the share.

    Raises:
        InvalidArgumentError: a field is not fetched, or already has a slice.
    """
    if isinstance(cp_fields, str):
        raise InvalidArgumentError(f"cp_fields is {cp_fields!r}; expected a list of field names", field="cp_fields")
    slices = dict(options.get("slices") or {})
    shares: dict[str, RowSlice] = {}
    for name in cp_fields:
        if name not in data_fields or name in slices:
            problem = "is also in the slices of read_options" if name in slices else "is not in data_fields"
            raise InvalidArgumentError(
                f"cp_fields has field {name!r}, which {problem}; expected only fetched fields that have no slice",
                field="cp_fields",
                metadata={"field_name": name},
            )
        value = fill.get(name, 0) if isinstance(fill, Mapping) else fill
        slices[name] = shares.setdefault(
            repr(value), replace(share, fill=value, positions=CP_POSITIONS if positions else "")
        )
    return {**options, "slices": slices}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRead:
    """The state of a call that reads padded columns.

    Attributes:
        padding: padding options.
        row_count: number of rows in the result.
        device: device to which padded columns are copied, or None for the CPU.
        specs: field specs that are known before the read.
        columns: a dict that maps fields to the columns that are padded during the transfer.
        parts: a dict that maps fields to the received parts of `columns`.
    """

    padding: Padding
    row_count: int
    device: Any
    specs: Mapping[str, FieldSpec]
    columns: Mapping[str, PaddedColumn]
    parts: dict[str, list[tuple[Indexes, ColumnShape, Bytes]]] = field(default_factory=dict)

    def rows_of(self, read: StorageRead) -> _RowsOfRead:
        """Return the placement of the rows of a read."""
        return _RowsOfRead(self.columns, read.positions)

    def take(self, reads: Sequence[StorageRead], answers: Sequence[Sequence[Received]]) -> list[list[Received]]:
        """Store the columns that were padded during the transfer, and return the other columns."""
        for read, answer in zip(reads, answers, strict=True):
            for column, values in answer:
                if column.spec.name in self.columns:
                    self.parts.setdefault(column.spec.name, []).append((read.positions, column, values))
        return [[each for each in answer if each[0].spec.name not in self.columns] for answer in answers]

    def finish(self, columns: Sequence[Received], wanted: Sequence[str]) -> list[Received]:
        """Return all columns, padding any that were not padded during the transfer."""
        found = {name: column.assemble(self.parts[name]) for name, column in self.columns.items()}
        names = [*wanted, *(column.spec.name for column, _ in columns if column.spec.name not in wanted)]
        for column, values in columns:
            spec = column.spec
            known = self.specs.get(spec.name, spec)
            is_shared = known.scope is FieldScope.GROUP
            if known.layout is not Layout.JAGGED and self.padding.fields is None:
                known = spec  # for a dense field whose rows were sliced to different lengths
            if self.padding.pads(known) and not is_shared:
                padded = PaddedColumn(self.padding, known, self.row_count, self.device)
                found[spec.name] = padded.assemble([(np.arange(self.row_count), column, values)])
            else:
                found[spec.name] = [(column, values)]
        return [*(found[name][0] for name in names), *(each for name in names for each in found[name][1:])]


@dataclass(frozen=True, slots=True)
class _RowsOfRead:
    """The placement of one response's rows. Implements `RowPlacement`."""

    columns: Mapping[str, PaddedColumn]
    positions: Indexes

    def place(self, column: ColumnShape) -> ScatteredRows | None:
        """Return the memory for a column's rows, or None if the rows are to be received contiguously."""
        padded = self.columns.get(column.spec.name)
        return None if padded is None else padded.place(column, self.positions)
