"""Keys, groups and custom_meta of samples as they are given: as lists, or as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.client.requests import listed
from tq_service.custom_meta import MetaColumn, MetaValue
from tq_service.errors import InvalidArgumentError
from tq_service.texts import Texts, check_texts
from tq_service.wire.metadata import rows_to_meta_columns, values_to_meta_column

_MANY: Final = 64  # names from which on an array of them stays one

# A list, or an array of text `(n,)`.
NameColumn: TypeAlias = "Sequence[str] | NDArray[np.str_]"
GroupColumn: TypeAlias = "Sequence[str | None] | NDArray[np.str_]"
# A mapping for each sample, or for each name an array, a tensor or a list of `n` values.
MetaGiven: TypeAlias = "Sequence[Mapping[str, MetaValue]] | Mapping[str, Any]"


def keys_of(keys: NameColumn) -> Sequence[str]:
    """Return keys as they are sent; those of a large array stay bytes.

    Raises:
        InvalidArgumentError: they are no list, or a text of an array is not valid Unicode.
    """
    return _names("keys", keys) if _is_large(keys) else listed("keys", keys)


def groups_of(groups: GroupColumn) -> Sequence[str]:
    """Return groups as they are sent, "" for none; see `keys_of`."""
    if _is_large(groups):
        return _names("groups", groups, are_shared=True)
    return ["" if group is None else group for group in listed("groups", groups)]


def _is_large(names: Any) -> bool:
    return isinstance(names, np.ndarray) and names.dtype.kind == "U" and names.ndim == 1 and names.size > _MANY


def _names(name: str, names: Any, *, are_shared: bool = False) -> Texts:
    try:
        return Texts.of_array(names, are_shared=are_shared)
    except UnicodeEncodeError:
        check_texts(names.tolist(), name, name)
        raise


def meta_columns_of(custom_meta: MetaGiven) -> tuple[list[MetaColumn], int | None]:
    """Return custom_meta as columns, and of how many samples it is; None: it names no column.

    Raises:
        InvalidArgumentError: a value that JSON does not have, or columns of different sizes.
    """
    if not isinstance(custom_meta, Mapping):
        return rows_to_meta_columns(custom_meta), len(custom_meta)
    columns = [values_to_meta_column(name, values) for name, values in custom_meta.items()]
    for column in columns:
        if column.present.size != columns[0].present.size:
            raise InvalidArgumentError(
                f"custom_meta[{column.name!r}] has {column.present.size} values, custom_meta[{columns[0].name!r}] has "
                f"{columns[0].present.size}; give one for each sample",
                field="custom_meta",
            )
    return columns, columns[0].present.size if columns else None


def check_meta_count(meta_count: int, row_count: int) -> None:
    """Raise InvalidArgumentError where custom_meta is for another number of samples."""
    if meta_count != row_count:
        raise InvalidArgumentError(
            f"custom_meta is for {meta_count} samples, expected {row_count}: one mapping, or one value of each column, "
            f"for each sample",
            field="custom_meta",
        )


def as_column(names: Sequence[str]) -> tuple[str, ...] | Texts:
    """Return keys or groups as a batch keeps them: many that came as an array stay bytes."""
    return names if isinstance(names, Texts) else tuple(names)


def any_text(names: Sequence[str]) -> bool:
    """Whether one of the names is not empty."""
    return bool(names.utf8) if isinstance(names, Texts) else any(names)
