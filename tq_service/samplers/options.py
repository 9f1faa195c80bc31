"""Reads a sampler's options from its constructor, and validates the sampler_config sent by clients."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter

from tq_service.errors import InvalidArgumentError, nearest
from tq_service.results import SamplerDescription, SamplerOption
from tq_service.state.plan import Sampler

_FIELD: Final = "sampler_config"
_REQUIRED: Final = inspect.Parameter.empty


def describe_sampler(name: str, kind: type[Sampler]) -> SamplerDescription:
    """Describe a sampler class by its name, the first sentence of its docstring, and its options."""
    first_paragraph = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    sentence, stop, _ = first_paragraph.partition(". ")
    parameters, _ = _parameters(kind)
    hints, texts = _type_hints(kind), _documented(kind)
    options = [
        SamplerOption(
            name=option,
            type=_words(hints.get(option, Any)).removeprefix("a "),
            default_json=None if parameter.default is _REQUIRED else json.dumps(parameter.default, default=repr),
            summary=texts.get(option, ""),
        )
        for option, parameter in sorted(parameters.items(), key=lambda each: each[1].default is not _REQUIRED)
    ]
    return SamplerDescription(name=name, summary=sentence + stop.strip(), options=tuple(options))


def _documented(kind: type[Sampler]) -> dict[str, str]:
    """Return each option's text from the docstrings of a class and its bases. Derived classes take precedence."""
    texts: dict[str, str] = {}
    for doc in (inspect.getdoc(part) for base in kind.__mro__[:-1] for part in (base, vars(base).get("__init__"))):
        section = re.search(r"^(?:Attributes|Args):\n((?:\s+.*\n?|\n)+)", doc or "", re.MULTILINE)
        entries = re.split(r"^ {4}(?=\w)", section[1], flags=re.MULTILINE)[1:] if section else []
        for name, _, text in (entry.partition(": ") for entry in entries):
            texts.setdefault(name, " ".join(text.split()))
    return texts


def build_sampler(name: str, kind: type[Sampler], config: Mapping[str, object]) -> Sampler:
    """Create a sampler of class `kind` with the options in `config`.

    Raises:
        InvalidArgumentError: an option is unknown or missing, or its type or value is invalid.
    """
    parameters, takes_any = _parameters(kind)
    for option in config:
        if option not in parameters and not takes_any:
            raise InvalidArgumentError(
                f"sampler_config: sampler {name!r} has no option {option!r}; {nearest(option, parameters)}",
                field=_FIELD,
                reason="UNKNOWN_SAMPLER",
                metadata={"sampler": name, "option": option},
            )
    missing = [
        option for option, parameter in parameters.items() if parameter.default is _REQUIRED and option not in config
    ]
    if missing:
        raise InvalidArgumentError(
            f"sampler_config: sampler {name!r} requires {', '.join(map(repr, missing))}; got "
            f"{', '.join(map(repr, config)) or 'no options'}",
            field=_FIELD,
            metadata={"option": missing[0]},
        )
    hints = _type_hints(kind)
    options: dict[str, object] = {}
    for option, value in config.items():
        try:
            options[option] = _checked(value, hints.get(option, Any))
        except (TypeError, ValueError):
            got, expected = json.dumps(value, default=repr), _words(hints[option])
            raise InvalidArgumentError(
                f"sampler_config: sampler {name!r}, option {option!r}: got {got:.200}, expected {expected}",
                field=_FIELD,
                metadata={"option": option, "got": got, "expected": expected},
            ) from None
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        message = f"sampler_config: sampler {name!r} rejected the options {json.dumps(options, default=repr)}: {error}"
        option = str(error).partition(":")[0]
        if option not in parameters:
            raise InvalidArgumentError(message, field=_FIELD) from error
        raise InvalidArgumentError(message, field=_FIELD, metadata={"option": option}) from error


def _parameters(kind: type[Sampler]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the keyword parameters of the constructor, and whether it also accepts arbitrary keywords (`**kwargs`)."""
    parameters = inspect.signature(kind).parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword},
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )


def _type_hints(kind: type[Sampler]) -> dict[str, Any]:
    # A dataclass may inherit options whose types are imported only in the module of a base class. For a class,
    # `get_type_hints` searches the module of each base. For a generated constructor, it searches only the module of the
    # subclass.
    annotated = kind if is_dataclass(kind) else kind.__init__
    try:
        return get_type_hints(annotated)
    except (NameError, TypeError):  # names imported only for type checking; only the constructor validates values
        return {}


_WORDS: Final[Mapping[Any, str]] = {
    int: "a whole number", float: "a number", bool: "a truth value", str: "text", type(None): "null", None: "null",
}  # fmt: skip
_LISTS: Final = (list, tuple, Sequence)


def _words(hint: Any) -> str:
    """Describe a type hint in JSON terms, which clients in any language understand.

    Return "" if only the constructor can validate values of this type.
    """
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(filter(None, map(_words, get_args(hint))))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) in _LISTS:
        return f"a list of {_words(get_args(hint)[0]).removeprefix('a ')}s"
    return _WORDS.get(hint, "")


def _checked(value: object, hint: Any) -> object:
    """Validate a value against a type hint, unless only the constructor can validate it, and return the value."""
    if not _words(hint):
        return value
    try:
        adapter = TypeAdapter(hint)
    except PydanticUserError:  # the hint contains a type defined by the sampler
        return value
    return adapter.validate_json(json.dumps(value), strict=True)


def whole_numbers(value: Any) -> Any:
    """Convert integral floats in a JSON value to integers, because the wire format sends all numbers as doubles."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: whole_numbers(each) for name, each in value.items()}
    return value
