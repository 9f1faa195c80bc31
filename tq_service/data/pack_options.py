"""PackOptions: how the samples of a pack become one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tq_service.data.padding import PADDING_SEQUENCE_LENGTH
from tq_service.errors import InvalidArgumentError

Overlong = Literal["error", "truncate"]

LABEL_PADDING = -100
"""What loss functions leave out: the default `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How the samples of a pack become one sequence.

    Fields with a value for each token are concatenated, others are kept, one row a sample. These are per token:
    `input_field`, `token_fields` and `position_ids`; any other jagged field; and, where the input field
    is dense, since samples of one length only were put, any other dense field with one dimension of that size. Others
    are per sample, and so are `repeat_fields` and `keep_fields` in any case. Where that leaves a doubt it is an error,
    which `token_fields` or `keep_fields` settles.

    Attributes:
        pack_max_length: tokens of every pack; the `pack_max_length` of the sampler `packed`.
        input_field: the field whose rows are the tokens of the samples.
        pad_token_id: what `input_field` is padded with.
        label_fields: per-token fields padded with -100, where the data has them.
        token_fields: fields that have a value for each token, also where their rows happen to be alike.
        repeat_fields: dense fields whose value is repeated over the tokens of its sample, such as an advantage.
        keep_fields: fields that have no value for each token, such as prompts, the patches of images or an embedding;
            they stay as they are, one row a sample.
        pad_values: by field, what other per-token and repeated fields are padded with; 0 (False) where not given.
        padding_sequence_length: padding tokens are laid out as sequences of at most so many tokens.
        overlong: what to do with a sample of more than `pack_max_length` tokens: "error", or "truncate" it to its first
            ones, as the sampler's `overlong="truncate"` plans it.

    Raises:
        InvalidArgumentError: an option cannot be right.
    """

    pack_max_length: int
    input_field: str = "input_ids"
    pad_token_id: int = 0
    label_fields: tuple[str, ...] = ("labels",)
    token_fields: tuple[str, ...] = ()
    repeat_fields: tuple[str, ...] = ()
    keep_fields: tuple[str, ...] = ()
    pad_values: Mapping[str, bool | int | float] = field(default_factory=dict)
    padding_sequence_length: int = PADDING_SEQUENCE_LENGTH
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        for name in ("pack_max_length", "padding_sequence_length"):
            if getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "at least 1")
        if self.overlong not in get_args(Overlong):
            raise _invalid("overlong", repr(self.overlong), "'error' or 'truncate'")
        for name in ("label_fields", "token_fields", "repeat_fields", "keep_fields"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        twice = {self.input_field} & {*self.label_fields, *self.repeat_fields, *self.keep_fields}
        twice |= set(self.repeat_fields) & set(self.keep_fields)
        twice |= {*self.label_fields, *self.token_fields} & {*self.repeat_fields, *self.keep_fields}
        if twice:
            raise _invalid(
                "input_field, label_fields, token_fields, repeat_fields and keep_fields",
                f"{sorted(twice)[0]!r} twice",
                "it once",
            )

    def pad_value(self, name: object) -> bool | int | float:
        """Return what a per-token or repeated field is padded with."""
        if name == self.input_field:
            return self.pad_token_id
        if isinstance(name, str) and name in self.pad_values:
            return self.pad_values[name]
        return LABEL_PADDING if name in self.label_fields else 0


def _names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise _invalid(option, repr(names), "a list of field names")
    return tuple(names)


def _invalid(name: str, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: got {got}; expected {expected}", field=name)
