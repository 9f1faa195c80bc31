"""Words of the public API as enum numbers of the protos, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Generic, TypeVar, get_args

from tq_service.errors import InvalidArgumentError
from tq_service.schema import BatchUnit, KeyMode, Layout, Operator, SampleState
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb

Word = TypeVar("Word", bound=str)


class EnumWords(Generic[Word]):
    """The words of one enum; None stands for "unspecified".

    Args:
        name: of the field, for errors.
        numbers: the number of each word.
    """

    def __init__(self, name: str, numbers: Mapping[Word, int]) -> None:
        self._name = name
        self._numbers = {str(word): number for word, number in numbers.items()}
        self._words: dict[int, Word | None] = {0: None, **{number: word for word, number in numbers.items()}}

    def encode(self, word: str | None, name: str | None = None) -> Any:
        """Return the number of a word; `name` is that of the argument it was given as.

        Raises:
            InvalidArgumentError: the enum has no such word.
        """
        if word is None:
            return 0
        if word not in self._numbers:
            name = name or self._name
            raise InvalidArgumentError(f"{name} is {word!r}, expected one of {', '.join(self._numbers)}", field=name)
        return self._numbers[word]

    def decode(self, number: int) -> Word | None:
        """Return the word of a number.

        Raises:
            InvalidArgumentError: the enum has no such number.
        """
        if number not in self._words:
            raise InvalidArgumentError(
                f"{self._name}: the number {number} is unknown; send that of {', '.join(self._numbers)}",
                field=self._name,
            )
        return self._words[number]


def _numbers(enum: Any, words: Iterable[Word]) -> dict[Word, int]:
    """Return the numbers of words that are the names of the enum's values, without their common prefix."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {word: enum.Value(prefix + word.upper()) for word in words}


LAYOUTS: Final = EnumWords("layout", _numbers(metadata_pb2.Layout, Layout))
STATES: Final = EnumWords("state", _numbers(metadata_pb2.SampleState, SampleState))
KEY_MODES: Final[EnumWords[KeyMode]] = EnumWords("key_mode", _numbers(commit_pb2.KeyMode, get_args(KeyMode)))
BATCH_UNITS: Final[EnumWords[BatchUnit]] = EnumWords("batch_unit", _numbers(pb.BatchUnit, get_args(BatchUnit)))
OPERATORS: Final[EnumWords[Operator]] = EnumWords(
    "where",
    {
        "==": pb.OPERATOR_EQ,
        "!=": pb.OPERATOR_NE,
        "<": pb.OPERATOR_LT,
        "<=": pb.OPERATOR_LE,
        ">": pb.OPERATOR_GT,
        ">=": pb.OPERATOR_GE,
        "in": pb.OPERATOR_IN,
    },
)
