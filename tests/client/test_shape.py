"""The two clients are one: generated, with the same methods; and no call of the service is without a method."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import tq_service as tq
from tq_service import errors, schema
from tq_service.server.rpc.methods import METHODS
from tq_service.wire.error_table import ERROR_CLASSES

ROOT = Path(__file__).parents[2]


def public_methods(kind):
    return {
        name: method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in ("close", "aclose")
    }


ITERATORS = {"watch", "work"}  # which are made without a call


def test_signatures_agree():
    sync, asynchronous = public_methods(tq.Client), public_methods(tq.AsyncClient)
    assert sync.keys() == asynchronous.keys()
    for name, method in sync.items():
        assert str(inspect.signature(method)) == str(inspect.signature(asynchronous[name])).replace("Async", ""), name
        assert not inspect.iscoroutinefunction(method)
        assert inspect.iscoroutinefunction(asynchronous[name]) == (name not in ITERATORS), name
    assert inspect.signature(tq.Client) == inspect.signature(tq.AsyncClient)


def test_options_of_claims_are_those_of_the_method():
    options = {name: each.__forward_arg__ for name, each in inspect.get_annotations(tq.types.ClaimOptions).items()}
    parameters = inspect.signature(tq.Client.claim).parameters
    claim = {name: each.annotation for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    del claim["batch_count"], claim["timeout"]
    assert options == claim | {"batch_size": "Required[int]"}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (schema.LayoutGiven, tq.types.Layout),
        (schema.EncodingGiven, tq.types.Encoding),
        (schema.ScopeGiven, tq.types.FieldScope),
        (schema.StateGiven, tq.types.SampleState),
    ],
)
def test_words_that_are_accepted_for_an_enum_are_its_values(given, kind):
    enum, words = get_args(given)
    assert (enum, get_args(words)) == (kind, tuple(kind))


@pytest.mark.parametrize("kind", [tq.Client, tq.AsyncClient])
def test_every_method_takes_a_timeout_and_says_what_it_does(kind):
    for name, method in public_methods(kind).items():
        assert inspect.signature(method).parameters["timeout"].default is None, name
        assert method.__doc__, name


def test_every_call_of_the_service_has_a_method():
    calls = {method.short_name for method in METHODS.values() if method.name.startswith("/tq_service.")}
    calls -= {method.short_name for method in METHODS.values() if method.is_internal}
    directories = (ROOT / "tq_service" / name for name in ("client/_sync", "dataplane"))
    paths = [path for directory in directories for path in directory.rglob("*.py")]
    paths.append(ROOT / "tq_service" / "client" / "transport.py")
    source = "".join(path.read_text() for path in paths)
    made = r"(?:unary|unary_once|_ask|_pages|method_of|Put)\(\s*(?:kind=)?(?:\w+\.)?([A-Z]\w+)Response\b"
    of_client = set(re.findall(made, source)) - {"HealthCheck"}
    of_dataplane = set(re.findall(r"\.storage\.([A-Z]\w+)|_SERVICE \+ \"(\w+)\"", source))
    assert of_client | {name for names in of_dataplane for name in names if name} == calls


def test_the_package_exports_its_parts():
    for kind in ERROR_CLASSES:
        assert getattr(tq.errors, kind.__name__) is getattr(errors, kind.__name__)
    assert all(hasattr(tq.types, name) for name in tq.types.__all__)
    assert tq.samplers.SequentialSampler.name == "sequential"
    assert {"Client", "AsyncClient", "BatchMeta"} <= set(dir(tq))
    with pytest.raises(AttributeError, match="Klient"):
        _ = tq.Klient


def test_the_package_shows_what_is_for_users() -> None:
    assert dir(tq) == sorted(tq.__all__)
    assert all(hasattr(tq, name) for name in dir(tq))
