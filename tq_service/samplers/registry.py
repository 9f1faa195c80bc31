"""Finding samplers by name: built in, registered, of installed packages, or of any module."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from tq_service.daemon_threads import run_in_daemon_thread
from tq_service.errors import UnknownSamplerError, nearest
from tq_service.samplers.chosen import ChosenSampler
from tq_service.samplers.grpo_group_n import GRPOGroupNSampler
from tq_service.samplers.options import SamplerInfo, build_sampler, describe_sampler
from tq_service.samplers.packed import PackedSampler
from tq_service.samplers.rank_aware import RankAwareSampler
from tq_service.samplers.seqlen_balanced import SeqlenBalancedSampler
from tq_service.samplers.sequential import SequentialSampler
from tq_service.samplers.token_budget import TokenBudgetSampler
from tq_service.state.plan import Sampler

ENTRY_POINT_GROUP = "tq_service.samplers"
BUILT_IN: tuple[type[Sampler], ...] = (
    SequentialSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    TokenBudgetSampler,
    PackedSampler,
    ChosenSampler,
)


class SamplerRegistry:
    """Samplers by name, with their options checked.

    A name is that of a built-in or registered sampler, of an entry point of group `tq_service.samplers`, or, where
    allowed, `module:Class`. Code of others is imported in a thread, on its first use. Samplers have no state, so one
    instance serves all requests with the same options. Belongs to one event loop.
    """

    def __init__(self, *, allow_import: bool = False, max_instances: int = 256) -> None:
        """Make a registry of the built-in samplers.

        Args:
            allow_import: whether `module:Class` may name any importable class. A client then decides what code the
                server imports.
            max_instances: how many resolved samplers to keep.
        """
        self._allow_import = allow_import
        self._max_instances = max_instances
        self._classes: dict[str, type[Sampler]] = {kind.name: kind for kind in BUILT_IN}
        self._imported: dict[str, type[Sampler]] = {}
        self._instances: OrderedDict[tuple[str, str], Sampler] = OrderedDict()

    def register(self, name: str, cls: type[Sampler]) -> None:
        """Add a sampler under a name.

        Raises:
            ValueError: the name is empty, has a colon or is taken, or the class has no `plan`.
        """
        if not name or ":" in name:
            raise ValueError(f"name: got {name!r}, expected a name that is not empty and has no colon")
        if self._classes.get(name, cls) is not cls:
            raise ValueError(f"name: {name!r} is taken by {self._classes[name].__qualname__}; choose another name")
        _check_class(name, cls)
        self._classes[name] = cls

    async def resolve(self, name: str, config: Mapping[str, object] | None = None) -> Sampler:
        """Return the sampler of this name with these options.

        Raises:
            UnknownSamplerError: there is no such sampler, it cannot be loaded, or it has no such option.
            InvalidArgumentError: an option is missing, or its type or value is wrong.
        """
        text = _canonical(config or {})
        if text is None:
            return build_sampler(name, await self._class(name), config or {})
        known = self._instance(name, text)
        return self._add_instance(name, text, config or {}, await self._class(name)) if known is None else known

    async def resolve_json(self, name: str, config_json: str) -> Sampler:
        """Return the sampler of this name with options as canonical JSON (keys sorted); see `resolve`."""
        known = self._instance(name, config_json)
        if known is not None:
            return known
        return self._add_instance(name, config_json, json.loads(config_json), await self._class(name))

    def _instance(self, name: str, config_json: str) -> Sampler | None:
        key = (name, config_json)
        sampler = self._instances.get(key)
        if sampler is not None:
            self._instances.move_to_end(key)
        return sampler

    def _add_instance(self, name: str, config_json: str, config: Mapping[str, object], kind: type[Sampler]) -> Sampler:
        sampler = build_sampler(name, kind, config)
        self._instances[name, config_json] = sampler
        while len(self._instances) > self._max_instances:
            self._instances.popitem(last=False)
        return sampler

    async def _class(self, name: str) -> type[Sampler]:
        return self._classes.get(name) or self._imported.get(name) or await self._load(name)

    def describe(self) -> list[SamplerInfo]:
        """Return the samplers by name; those of packages not used yet are listed without being loaded."""
        infos = {name: describe_sampler(name, kind) for name, kind in (self._imported | self._classes).items()}
        for name, entry_point in self._entry_points.items():
            infos.setdefault(name, SamplerInfo(name=name, summary=f"Of an installed package: {entry_point.value}."))
        return [infos[name] for name in sorted(infos)]

    @functools.cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        return {entry_point.name: entry_point for entry_point in found}

    async def _load(self, name: str) -> type[Sampler]:
        # Two calls may load one name at the same time: Python imports a module once, so both get the same class.
        if "_entry_points" not in vars(self):  # reads the metadata of all installed packages
            await run_in_daemon_thread(lambda: self._entry_points, thread_name="tq-sampler-entry-points")
        if name in self._entry_points:
            kind = await _import(name, self._entry_points[name].load)
        elif ":" in name and self._allow_import:
            kind = await _import(name, functools.partial(_import_class, name))
        else:
            raise self._unknown(name)
        self._imported[name] = kind
        return kind

    def _unknown(self, name: str) -> UnknownSamplerError:
        known = {*self._classes, *self._entry_points}
        if ":" in name:
            return UnknownSamplerError(
                f"sampler: got {name!r}, but this server does not import samplers by module:Class; allow it "
                f"(allow_sampler_import), or install the sampler as an entry point of {ENTRY_POINT_GROUP!r}; "
                f"{nearest(name, known, all_known=True)}",
                field="sampler",
                metadata={"sampler": name},
            )
        return UnknownSamplerError(
            f"sampler: got {name!r}, which is unknown; {nearest(name, known, all_known=True)}",
            field="sampler",
            metadata={"sampler": name},
        )


async def _import(name: str, load: Callable[[], Any]) -> type[Sampler]:
    try:
        kind = await run_in_daemon_thread(load, thread_name=f"tq-import-{name}")
        return _check_class(name, kind)
    except asyncio.CancelledError:
        raise
    except ImportError as error:
        raise UnknownSamplerError(
            f"sampler: {name!r} cannot be imported by the service: {type(error).__name__}: {error}; is it installed "
            "where the service runs, or on the service's PYTHONPATH?",
            field="sampler",
            metadata={"sampler": name},
        ) from error
    except BaseException as error:  # code of others: it may raise anything, also SystemExit
        raise UnknownSamplerError(
            f"sampler: {name!r} cannot be loaded by the service: {type(error).__name__}: {error}",
            field="sampler",
            metadata={"sampler": name},
        ) from error


def _import_class(name: str) -> Any:
    module_name, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module_name))


def _check_class(name: str, kind: Any) -> type[Sampler]:
    if not inspect.isclass(kind) or not callable(getattr(kind, "plan", None)):
        raise ValueError(f"sampler {name!r}: got {kind!r}, expected a class with a method plan(view, request)")
    if not issubclass(kind, Sampler):
        raise ValueError(
            f"sampler {name!r}: got {kind.__qualname__}, expected a subclass of tq_service.samplers.Sampler"
        )
    return kind


def _canonical(config: Mapping[str, object]) -> str | None:
    """Return what is equal for equal options; None for options that cannot be compared."""
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(dict(config), sort_keys=True)
    return None
