"""Nothing that comes from elsewhere is run: the package neither evaluates nor unpickles, loaders' own workers apart."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tq_service"
FILES = sorted(PACKAGE.rglob("*.py"))

# Formats that run code or trust their input, by module.
MODULES = {
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "yaml",
}
# A data loader and the worker processes that it started talk over pipes that they inherit and nobody else can reach, as
# torch's do: batches may hold whatever the user's own functions return. Nothing of it is of the service.
OF_ONE_PROGRAM = {
    "pickle": {"data/workers.py"},
    "multiprocessing": {
        "data/dataset.py",
        "data/source.py",
        "data/workers.py",
    },
}
CALLS = {"eval", "exec", "compile", "__import__"}
# Attributes that load or run code, whatever object they are of.
ATTRIBUTES = {
    "loads_pickle",
    "allow_pickle",
    "find_class",
    "Unpickler",
    "Pickler",
    "unsafe_load",
    "run_module",
    "run_path",
}
# Reading a regular expression is no running of code.
ALLOWED_OWNERS = {"re"}
# Importing a module by a name runs it.
IMPORTERS = {
    "__init__.py",  # names of this package
    "cli/__init__.py",  # names of commands
    "objects/base.py",  # engines, built in or of installed packages
    "samplers/service.py",  # samplers that the operator allows
}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def findings(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in CALLS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            is_known = node.attr in CALLS and isinstance(node.value, ast.Name) and node.value.id in ALLOWED_OWNERS
            if node.attr in CALLS | ATTRIBUTES and not is_known:
                found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
            found.append(f"{node.arg}=")
    return found


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert len(FILES) > 200
    assert [f"{relative(path)}: {each}" for path in FILES for each in violations(path)] == []


def violations(path: Path) -> list[str]:
    name, tree = relative(path), ast.parse(path.read_text())
    modules = imported(tree)
    wrong = modules & MODULES
    wrong |= {module for module, users in OF_ONE_PROGRAM.items() if module in modules and name not in users}
    allowed = {"Pickler", "Unpickler"} if name in OF_ONE_PROGRAM["pickle"] else set()
    wrong |= set(findings(tree)) - allowed
    if name not in IMPORTERS:
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)]
        wrong |= {_name(node) for node in nodes} & {"import_module"}
    return sorted(wrong)


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def test_only_what_trainers_run_is_of_one_program() -> None:
    layers = {name.partition("/")[0] for names in OF_ONE_PROGRAM.values() for name in names}
    assert layers == {"data"}


def test_the_lists_name_files_that_are_there() -> None:
    for name in set().union(IMPORTERS, *OF_ONE_PROGRAM.values()):
        assert (PACKAGE / name).exists(), name


def test_imports_are_found() -> None:
    for source in ("import pickle", "from pickle import loads", "import torch.x, dill", "from marshal import loads"):
        assert imported(ast.parse(source)) & (MODULES | OF_ONE_PROGRAM.keys()), source


def test_calls_are_found() -> None:
    for source in (
        "eval('1')",
        "builtins.exec(x)",
        "f = compile",
        "np.load(x, allow_pickle=True)",
        "run(x, shell=True)",
        "pd.Unpickler(f)",
    ):
        assert findings(ast.parse(source)), source
