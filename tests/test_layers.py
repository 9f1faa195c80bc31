"""The layers import only what they may: the arrows of the architecture, read from the source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tq_service"

LEAVES = {
    "addresses",
    "admission_turn",
    "client_probes",
    "custom_meta",
    "daemon_threads",
    "errors",
    "log_message",
    "results",
    "schema",
    "step_times",
    "version",
    "wait_clock",
}
# What each layer may import besides itself and the leaves. `tq_service` itself stands for the client it exports;
# it has `samplers`, for `sampler=` of a claim, and `Tls` from `wire`, so that a health probe does without the client.
ARROWS: dict[str, set[str]] = {
    "__init__": {"client", "observe", "samplers", "types", "wire"},
    "addresses": set(),
    "admission_turn": set(),
    "client_probes": set(),
    "custom_meta": set(),
    "daemon_threads": set(),
    "errors": set(),
    "log_message": set(),
    "results": set(),
    "schema": set(),
    "step_times": set(),
    "types": {"client"},
    "version": set(),
    "wait_clock": set(),
    "memory_limit": set(),
    "config": {"memory_limit"},
    "v1": set(),
    "internal": {"v1"},
    # It stores bytes and arrays for the owners of records, whom it does not know.
    "journal": set(),
    "state": set(),
    "planning": {"state"},
    "machine": {"journal", "planning", "state"},
    "serving": {"machine", "planning", "state"},
    "balancing": set(),
    "samplers": {"balancing", "planning", "state"},
    "wire": {"v1"},
    "storage": {"journal", "objects", "wire", "v1"},
    "dataplane": {"wire", "v1", "internal"},
    # Engines know nothing of what the objects are; each imports its own package inside functions.
    "objects": set(),
    # It composes what the service is restored from: state and puts, in a data directory.
    "durable": {"journal", "machine", "serving", "state", "storage", "wire", "v1"},
    # Steps as they were planned, and their puts: written by the server, read by it and by the command line.
    "recording": {"journal", "objects", "state", "storage", "wire", "v1"},
    # The second backend of the log, and what of a cluster is in etcd; `durable` itself does without grpc.
    "cluster": {"journal", "wire", "internal"},
    # It reads what it shows, and is called by nothing that it reads; `observe/clients.py` reads nothing.
    "observe": {"durable", "serving", "state", "storage"},
    "server": {
        "cluster",
        "objects",  # it opens the engine of a mirror
        "observe",
        "durable",
        "recording",
        "journal",
        "samplers",
        "storage",
        "dataplane",
        "wire",
        "machine",
        "planning",
        "serving",
        "state",
        "v1",
        "internal",
        "config",
    },
    "client": {"dataplane", "wire", "v1"},
    "data": {"client", "balancing", "wire"},
    "integrations": {"client"},
    "observe/page": {"client"},
    "testing": set(),
    "compat": {"balancing", "cli", "client", "data", "server", "testing"},
    "cli": {"server", "recording", "client", "balancing", "samplers", "config", "observe/page", "testing"},
}
CORE = ("state", "planning", "machine", "serving")
WIRE_FORMATS = {"grpc", "grpc_status", "grpc_health", "grpc_reflection", "google"}
TENSORS = {"torch", "tensordict"}
FORBIDDEN_PACKAGES: dict[str, set[str]] = {
    "addresses": WIRE_FORMATS | TENSORS,
    "client_probes": WIRE_FORMATS | TENSORS,
    "custom_meta": WIRE_FORMATS | TENSORS,
    "errors": WIRE_FORMATS | TENSORS,
    "log_message": WIRE_FORMATS | TENSORS,
    "results": WIRE_FORMATS | TENSORS,
    "schema": WIRE_FORMATS | TENSORS,
    "step_times": WIRE_FORMATS | TENSORS,
    "version": WIRE_FORMATS | TENSORS,
    "wait_clock": WIRE_FORMATS | TENSORS,
    "memory_limit": WIRE_FORMATS | TENSORS,
    "config": WIRE_FORMATS | TENSORS,
    "state": WIRE_FORMATS | TENSORS,
    "planning": WIRE_FORMATS | TENSORS,
    "machine": WIRE_FORMATS | TENSORS,
    "serving": WIRE_FORMATS | TENSORS,
    "balancing": WIRE_FORMATS | TENSORS,
    "samplers": WIRE_FORMATS | TENSORS,
    "objects": WIRE_FORMATS | TENSORS,
    "storage": TENSORS,
    "dataplane": TENSORS,
    "journal": WIRE_FORMATS | TENSORS,
    "durable": TENSORS | {"grpc", "grpc_status", "grpc_health", "grpc_reflection"},
    "cluster": TENSORS,
    "recording": TENSORS | {"grpc", "grpc_status", "grpc_health", "grpc_reflection"},
    "observe": WIRE_FORMATS | TENSORS,
    "server": TENSORS,
    "observe/page": WIRE_FORMATS | TENSORS,
    "cli": TENSORS,
}
TORCH_ONLY_INSIDE_FUNCTIONS = {"__init__", "client", "wire"}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if parts[:2] == ("observe", "page"):  # it is a client, and the rest of `observe` part of a server
        return "observe/page"
    return parts[0].removesuffix(".py")


def imported_modules(nodes: Iterator[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything imported; `from a import b` yields a.b, since b may be a module."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: neither function bodies nor TYPE_CHECKING blocks."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not typing_only and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                pending.append(child)


def layer_imported(name: str) -> str | None:
    """Return the layer that an absolute name belongs to, None outside the package."""
    top, _, rest = name.partition(".")
    if top != "tq_service":
        return None
    layer = "observe/page" if f"{rest}.".startswith("observe.page.") else rest.partition(".")[0]
    return layer if layer in ARROWS else "client"


def test_every_layer_has_its_arrows() -> None:
    assert {layer_of(path) for path in PACKAGE.rglob("*.py")} <= set(ARROWS)


def test_contributors_have_a_map_of_all_directories() -> None:
    """CONTRIBUTING.md has a line for each, with what a layer may import."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^\| (`[^|]+`) \| [^|]+ \|([^|]*)\|$", page, re.MULTILINE)
    quoted = re.compile(r"`(.+?)`")
    shown = {name: set(quoted.findall(imports)) for names, imports in lines for name in quoted.findall(names)}
    found = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "site" not in path.parts}
    assert found - {".", "internal"} <= set(shown)
    layers = {name: imports for name, imports in ARROWS.items() if (PACKAGE / name).is_dir()}
    layers["internal/v1"] = layers.pop("internal")
    assert {name: shown[name] for name in layers} == layers


def test_imports_follow_the_arrows() -> None:
    assert len(FILES) > 200
    assert [f"{path.relative_to(ROOT)} {each}" for path in FILES for each in wrong_imports(path)] == []


def wrong_imports(path: Path) -> list[str]:
    """Return the imports that the layer of a file may not have."""
    layer = layer_of(path)
    tree = ast.parse(path.read_text())
    allowed = ARROWS[layer] | LEAVES | {layer}
    forbidden = FORBIDDEN_PACKAGES.get(layer, set())
    wrong = [
        f"line {line}: {name}"
        for line, name in imported_modules(ast.walk(tree), path)
        if ((target := layer_imported(name)) is not None and target not in allowed) or name.split(".")[0] in forbidden
    ]
    if layer in TORCH_ONLY_INSIDE_FUNCTIONS:
        wrong += [
            f"line {line}: {name} at import time"
            for line, name in imported_modules(run_at_import(tree), path)
            if name.split(".")[0] in TENSORS
        ]
    return [f"({layer}) {each}" for each in wrong]


def test_the_check_sees_lazy_relative_and_typing_imports() -> None:
    source = (
        "from __future__ import annotations\n"
        "import tq_service.storage.engine\n"
        "from tq_service import errors\n"
        "from ..client import transport\n"
        "def lazily():\n    import torch\n"
        "if TYPE_CHECKING:\n    import grpc\n"
    )
    tree = ast.parse(source)
    path = PACKAGE / "wire" / "example.py"
    names = {name for _, name in imported_modules(ast.walk(tree), path)}
    assert {"tq_service.storage.engine", "tq_service.errors", "tq_service.client.transport", "torch", "grpc"} <= names
    at_import = {name for _, name in imported_modules(run_at_import(tree), path)}
    assert not {"torch", "grpc"} & at_import
    assert [
        layer_imported(name) for name in ("tq_service", "tq_service.Client", "tq_service.wire.columns", "numpy")
    ] == [
        "client",
        "client",
        "wire",
        None,
    ]


@pytest.mark.parametrize("module", ["tq_service", "tq_service.server.app", "tq_service.client", "tq_service.cli"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'tensordict'}} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert output.stdout.strip() == "[]", output.stdout + output.stderr


@pytest.mark.parametrize("layer", [*CORE, "balancing", "samplers", "config"])
def test_inner_layers_run_without_grpc(layer: str) -> None:
    code = f"import sys, tq_service.{layer}; print(sorted({{'grpc', 'google.protobuf', 'torch'}} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert output.stdout.strip() == "[]", output.stdout + output.stderr


@pytest.mark.parametrize("layer", ["state", "planning", "machine"])
def test_only_what_serves_knows_the_event_loop(layer: str) -> None:
    """What must be the same in a replay, or run in any thread, waits for nothing."""
    for path in FILES:
        if layer_of(path) == layer:
            names = {
                name.partition(".")[0] for _, name in imported_modules(ast.walk(ast.parse(path.read_text())), path)
            }
            assert "asyncio" not in names, path.relative_to(ROOT)


@pytest.mark.parametrize("package", ["v1", "internal/v1"])
def test_a_package_of_protos_holds_only_generated_files(package: str) -> None:
    protos = {path.stem for path in (ROOT / "protos/tq_service" / package).glob("*.proto")}
    expected = {f"{stem}_pb2{suffix}" for stem in protos for suffix in (".py", ".pyi", "_grpc.py", "_grpc.pyi")}
    found = {path.name for path in (PACKAGE / package).iterdir() if path.name != "__pycache__"}
    assert found == expected | {"__init__.py"}
    for path in (PACKAGE / package).glob("*.py"):
        head = path.read_text()[:200]
        assert "generated" in head.lower(), f"{path.name} does not say that it is generated"


def module_name(path: Path) -> str:
    """Return the name under which a file is imported: files of a site directory are imported as if it were the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[parts.index("site") + 1 :] if "site" in parts else parts
    return ".".join(parts).removesuffix(".__init__")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and of types count as well: they would only hide a circle from the interpreter."""
    paths = {module_name(path): path for path in FILES}
    waiting_for = {}
    for module, path in paths.items():
        names = {name for _, name in imported_modules(ast.walk(ast.parse(path.read_text())), path)}
        names = {name if name in paths else name.rpartition(".")[0] for name in names}
        waiting_for[module] = names & paths.keys() - {module}
    while free := {module for module, needed in waiting_for.items() if not needed}:
        waiting_for = {module: needed - free for module, needed in waiting_for.items() if module not in free}
    assert not waiting_for, "these import each other: " + ", ".join(sorted(waiting_for))


@pytest.mark.parametrize("layer", [*CORE, "balancing", "samplers", "objects", "storage", "journal", "durable"])
def test_an_inner_layer_hides_no_import_from_the_interpreter(layer: str) -> None:
    hiding = [path for path in FILES if layer_of(path) == layer and "TYPE_CHECKING" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in hiding] == []


def test_what_clients_compile_knows_nothing_of_what_services_tell_each_other() -> None:
    """The public protos import none of the internal ones, nor does the client's half of the package."""
    public = [path.read_text() for path in (ROOT / "protos/tq_service/v1").glob("*.proto")]
    assert public
    assert not [text for text in public if "tq_service/internal" in text]


def test_storage_services_are_described_without_those_of_the_controller() -> None:
    text = (ROOT / "protos/tq_service/v1/storage_service.proto").read_text()
    assert "controller_service.proto" not in text
