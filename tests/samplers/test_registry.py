"""The registry: names, options and their checks."""

import asyncio
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.client.requests import name_and_options
from tq_service.errors import InvalidArgumentError
from tq_service.results import SamplerOption
from tq_service.samplers import (
    GRPOGroupNSampler,
    Plan,
    RankAwareSampler,
    Sampler,
    SamplerRegistry,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from tq_service.samplers.service import BUILT_IN

PLUG_IN = '''
"""A sampler of a user."""
from tq_service.samplers import Plan, Sampler


class Newest(Sampler):
    """Takes the newest samples. And says so in two sentences."""

    name = "newest"

    def __init__(self, *, count: int = 2):
        self.count = count

    def plan(self, view, request):
        return Plan.of([view.ready()[-self.count:]])


not_a_class = 3


class NoPlan:
    pass
'''


@dataclass(frozen=True, kw_only=True)
class Picky(Sampler):
    """Has an option of each kind.

    Attributes:
        count: how many, at
            least so many.
        share: of all.
    """

    name: ClassVar[str] = "picky"

    count: int
    share: float = 0.5
    flag: bool = False
    label: str | None = None
    mode: Literal["a", "b"] = "a"

    def __post_init__(self):
        if self.share > 1:
            raise ValueError(f"share: got {self.share}, expected at most 1")

    def plan(self, view, request):
        return Plan.of([view.ready(self.count)])


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Make the module `plug_in_samplers` importable."""
    (tmp_path / "plug_in_samplers.py").write_text(PLUG_IN)
    (tmp_path / "broken_samplers.py").write_text("raise SystemExit('no GPU here')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "plug_in_samplers"
    sys.modules.pop("plug_in_samplers", None)


@pytest.fixture
def entry_point(plug_in, monkeypatch):
    """Make the plug-in an entry point named `newest`."""
    found = [
        EntryPoint(name="newest", value=f"{plug_in}:Newest", group="tq_service.samplers"),
        EntryPoint(name="broken", value="broken_samplers:Any", group="tq_service.samplers"),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: found if group == "tq_service.samplers" else []
    )


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("sequential", {}, SequentialSampler()),
        ("grpo_group_n", {"n_samples_per_prompt": 8}, GRPOGroupNSampler(n_samples_per_prompt=8)),
        ("rank_aware", {}, RankAwareSampler()),
        ("seqlen_balanced", {"length_key": "tokens"}, SeqlenBalancedSampler(length_key="tokens")),
        ("seqlen_balanced", {"n_samples_per_prompt": None}, SeqlenBalancedSampler()),
    ],
)
async def test_built_in_samplers_are_found_by_name(name, config, expected):
    assert await SamplerRegistry().resolve(name, config) == expected


def values_of(option):
    """Return values for an option of a built-in sampler, valid with any others."""
    if option.type.startswith("one of "):
        return st.sampled_from([word for word in option.type.removeprefix("one of ").split(", ") if word != "take"])
    numbers = st.integers(1, 4) if option.name in ("n_samples_per_prompt", "packs_multiple_of") else st.just(64)
    kinds = {
        "text": st.text("abc", min_size=1), "number": st.floats(0, 1), "truth value": st.booleans(),
        "whole number": numbers, "list of whole numbers": st.lists(st.integers(0, 9), min_size=1, unique=True),
    }  # fmt: skip
    kind, _, null = option.type.partition(" or ")
    return kinds[kind] | st.none() if null else kinds[kind]


@given(data=st.data(), info=st.sampled_from(SamplerRegistry().describe()))
def test_an_object_and_its_name_with_options_are_the_same_sampler(data, info):
    """So they make the same plans, and ranks may give either."""
    config = {
        option.name: data.draw(values_of(option), option.name)
        for option in info.options
        if option.default_json is None or data.draw(st.booleans())
    }
    kind = next(kind for kind in BUILT_IN if kind.name == info.name)
    try:
        sampler = kind(**config)
    except ValueError:  # options that do not go together
        return
    name, options = name_and_options(sampler, None)
    assert name == info.name
    assert {option: config[option] for option in options} == options
    assert asyncio.run(SamplerRegistry().resolve(name, options)) == sampler
    assert asyncio.run(SamplerRegistry().resolve(name, config)) == sampler


async def test_numbers_of_the_wire_become_integers():
    sampler = await SamplerRegistry().resolve("grpo_group_n", {"n_samples_per_prompt": 8.0})
    assert isinstance(sampler.n_samples_per_prompt, int)
    assert sampler.n_samples_per_prompt == 8


@pytest.mark.parametrize("name", ["grpo_group_n", "rank_aware", "seqlen_balanced"])
async def test_inherited_options_have_their_types(name):
    registry = SamplerRegistry()
    sampler = await registry.resolve(name, {"n_samples_per_prompt": 8.0, "incomplete_groups": "take"})
    assert (type(sampler.n_samples_per_prompt), sampler.incomplete_groups) == (int, "take")
    with pytest.raises(InvalidArgumentError, match=r"'incomplete_groups': got \"drop\", expected one of skip, take"):
        await registry.resolve(name, {"n_samples_per_prompt": 8, "incomplete_groups": "drop"})


async def test_every_kind_of_option():
    registry = SamplerRegistry()
    registry.register("picky", Picky)
    sampler = await registry.resolve("picky", {"count": 3.0, "share": 1, "flag": True, "label": "x", "mode": "b"})
    assert sampler == Picky(count=3, share=1.0, flag=True, label="x", mode="b")
    assert isinstance(sampler.share, float)


class Weights:
    """A type of a user, which only the sampler's constructor knows how to make."""


async def test_an_option_with_a_type_of_its_own_is_left_to_the_constructor():
    class Weighted(Sampler):
        def __init__(self, *, weights: Sequence[float | Weights]):
            if not all(isinstance(weight, float) for weight in weights):
                raise TypeError("weights: expected numbers")
            self.weights = weights

        def plan(self, view, request):
            return Plan.of([view.ready()])

    registry = SamplerRegistry()
    registry.register("weighted", Weighted)
    assert (await registry.resolve("weighted", {"weights": [0.5]})).weights == [0.5]
    with pytest.raises(InvalidArgumentError, match="expected numbers"):
        await registry.resolve("weighted", {"weights": ["half"]})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"sampler 'picky' requires 'count'; got no options"),
        ({"count": 2.5}, r"'picky', option 'count': got 2.5, expected a whole number"),
        ({"count": True}, r"option 'count': got true, expected a whole number"),
        ({"count": "2"}, r'option .count.: got "2", expected a whole number'),
        ({"count": None}, r"option 'count': got null"),
        ({"count": 2, "share": "half"}, r'option .share.: got "half", expected a number'),
        ({"count": 2, "share": True}, r"option 'share': got true, expected a number"),
        ({"count": 2, "flag": 1}, r"option 'flag': got 1, expected a truth value"),
        ({"count": 2, "label": 5}, r"option 'label': got 5, expected text or null"),
        ({"count": 2, "mode": "c"}, r'option .mode.: got "c", expected one of a, b'),
        ({"count": 2, "share": 2.0}, r"'picky' rejected the options .*share: got 2.0, expected at most 1"),
    ],
)
async def test_wrong_options_are_named(config, message):
    registry = SamplerRegistry()
    registry.register("picky", Picky)
    with pytest.raises(InvalidArgumentError, match=message) as error:
        await registry.resolve("picky", config)
    assert error.value.reason == "INVALID_ARGUMENT"
    assert error.value.field == "sampler_config"
    assert error.value.metadata["option"] in message


@pytest.mark.parametrize("rows", [3, "12", ["1"], [1.5], [True], None])
async def test_a_list_has_what_it_is_of(rows):
    with pytest.raises(InvalidArgumentError, match="expected a list of whole numbers") as error:
        await SamplerRegistry().resolve("chosen", {"rows": rows})
    assert error.value.metadata["option"] == "rows"
    assert (await SamplerRegistry().resolve("chosen", {"rows": [4.0, 0]})).rows == [4, 0]


def test_options_are_described():
    (info,) = [info for info in described() if info.name == "picky"]
    assert [(one.name, one.type, one.default_json) for one in info.options] == [
        ("count", "whole number", None),
        ("share", "number", "0.5"),
        ("flag", "truth value", "false"),
        ("label", "text or null", "null"),
        ("mode", "one of a, b", '"a"'),
    ]
    assert [one.summary for one in info.options] == ["how many, at least so many.", "of all.", "", "", ""]


def test_all_options_of_built_in_samplers_are_described():
    options = [option for info in SamplerRegistry().describe() for option in info.options]
    assert len(options) > 20
    assert [option for option in options if not option.type or not option.summary.endswith(".")] == []


def described():
    registry = SamplerRegistry()
    registry.register("picky", Picky)
    return registry.describe()


def is_unknown(error):
    return error.reason == "UNKNOWN_SAMPLER"


async def test_unknown_options_list_the_known_ones():
    with pytest.raises(
        InvalidArgumentError,
        check=is_unknown,
        match=r"'grpo_group_n' has no option 'n_samples'; known: 'n_samples_per_pro",
    ):
        await SamplerRegistry().resolve("grpo_group_n", {"n_samples": 8})
    with pytest.raises(InvalidArgumentError, check=is_unknown, match=r"'sequential' has no option 'n'; none is known"):
        await SamplerRegistry().resolve("sequential", {"n": 8})


async def test_unknown_samplers_name_the_nearest():
    with pytest.raises(
        InvalidArgumentError,
        check=is_unknown,
        match=r"got 'seqlen_balance', which is unknown; known: 'seqlen_balanced'",
    ):
        await SamplerRegistry().resolve("seqlen_balance")


async def test_equal_options_give_one_instance():
    registry = SamplerRegistry(max_instances=2)
    first = await registry.resolve("grpo_group_n", {"n_samples_per_prompt": 2, "incomplete_groups": "take"})
    again = await registry.resolve("grpo_group_n", {"incomplete_groups": "take", "n_samples_per_prompt": 2})
    assert first is again
    for n in (3, 4):
        await registry.resolve("grpo_group_n", {"n_samples_per_prompt": n})
    evicted = await registry.resolve("grpo_group_n", {"n_samples_per_prompt": 2, "incomplete_groups": "take"})
    assert evicted == first
    assert evicted is not first


async def test_options_as_canonical_json_give_the_same_instance():
    registry = SamplerRegistry()
    first = await registry.resolve_json("grpo_group_n", '{"n_samples_per_prompt": 2}')
    assert first == GRPOGroupNSampler(n_samples_per_prompt=2)
    assert await registry.resolve("grpo_group_n", {"n_samples_per_prompt": 2}) is first
    assert await registry.resolve_json("grpo_group_n", '{"n_samples_per_prompt": 2}') is first


async def test_options_that_are_no_json_are_built_again():
    registry = SamplerRegistry()
    with pytest.raises(InvalidArgumentError):
        await registry.resolve("grpo_group_n", {"n_samples_per_prompt": object()})


async def test_module_and_class(plug_in):
    registry = SamplerRegistry(allow_import=True)
    sampler = await registry.resolve(f"{plug_in}:Newest", {"count": 5})
    assert sampler.count == 5
    assert [info.summary for info in registry.describe() if info.name == f"{plug_in}:Newest"] == [
        "Takes the newest samples."
    ]


async def test_module_and_class_must_be_allowed(plug_in):
    with pytest.raises(InvalidArgumentError, check=is_unknown, match="does not import samplers by module:Class"):
        await SamplerRegistry().resolve(f"{plug_in}:Newest")
    assert plug_in not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:X", "ModuleNotFoundError"),
        ("plug_in_samplers:Missing", "AttributeError"),
        ("plug_in_samplers:not_a_class", "got 3; expected a class"),
        ("plug_in_samplers:NoPlan", "expected a class that is derived from"),
        ("broken_samplers:Any", "SystemExit: no GPU here"),
        (":", "ValueError"),
    ],
)
async def test_what_cannot_be_imported_says_why(plug_in, name, message):
    with pytest.raises(
        InvalidArgumentError, check=is_unknown, match=f"the service could not (import|load) .*: .*{message}"
    ):
        await SamplerRegistry(allow_import=True).resolve(name)


async def test_a_module_that_the_service_does_not_find_may_be_found_by_the_client():
    with pytest.raises(InvalidArgumentError, check=is_unknown) as caught:
        await SamplerRegistry(allow_import=True).resolve("no_such_module_here:X")
    assert caught.value.message == (
        "sampler: the service could not import 'no_such_module_here:X': ModuleNotFoundError: No module named "
        "'no_such_module_here'; install it where the service runs, or add it to the service's PYTHONPATH"
    )


async def test_an_unknown_name_shows_all_samplers_the_nearest_first(entry_point):
    registry = SamplerRegistry()
    with pytest.raises(InvalidArgumentError, check=is_unknown) as caught:
        await registry.resolve("seqlen_balance")
    assert "which is unknown; known: 'seqlen_balanced', " in caught.value.message
    assert all(repr(info.name) in caught.value.message for info in registry.describe())


async def test_entry_points_are_loaded_on_first_use(entry_point):
    registry = SamplerRegistry()
    summaries = {info.name: info.summary for info in registry.describe()}
    assert summaries["newest"] == "From an installed package: plug_in_samplers:Newest."
    assert "plug_in_samplers" not in sys.modules
    sampler = await registry.resolve("newest", {"count": 4})
    assert sampler.count == 4
    assert {info.name: info.options for info in registry.describe()}["newest"] == (
        SamplerOption(name="count", type="whole number", default_json="2", summary=""),
    )


async def test_a_broken_entry_point_harms_only_its_own_name(entry_point):
    registry = SamplerRegistry()
    with pytest.raises(InvalidArgumentError, check=is_unknown, match="the service could not load 'broken': SystemExit"):
        await registry.resolve("broken")
    assert await registry.resolve("sequential") == SequentialSampler()


def test_descriptions_are_sorted_and_complete():
    infos = SamplerRegistry().describe()
    names = [
        "chosen",
        "grpo_group_n",
        "packed",
        "rank_aware",
        "replay",
        "seqlen_balanced",
        "sequential",
        "token_budget",
    ]
    assert [info.name for info in infos] == names
    options = [[option.name for option in info.options] for info in infos]
    assert options[1] == ["n_samples_per_prompt", "incomplete_groups", "blocks"]
    assert options[2][:3] == ["optimizer_steps", "pack_max_length", "n_samples_per_prompt"]  # needed ones first
    assert all(info.summary.endswith(".") for info in infos)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("", Picky, "name: got ''"),
        ("a:b", Picky, "without a colon"),
        ("sequential", Picky, "already used by SequentialSampler"),
        ("x", int, "expected a class that is derived from"),
    ],
)
def test_bad_registrations(name, kind, message):
    with pytest.raises(ValueError, match=message):
        SamplerRegistry().register(name, kind)
