"""Manifests as helm renders them, and how tests look into them."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperOption

from tq_service.cli import app

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/tq-service"
KUBERNETES = ROOT / "deploy/kubernetes"
Manifest = dict[str, Any]


def program(name: str) -> ModuleType:
    """Return a program of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HELM = program("render_chart").find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not installed (scripts/get_helm.py gets it on Linux x86-64)"
)

INSECURE = ("--set", "insecure=true")
SECURED = ("--values", "values-secured.yaml")
STORAGE = ("--values", "values-storage.yaml")
ALL = (
    "--set",
    "monitoring.enabled=true,page.enabled=true,page.prefix=train@,page.rootPath=/tq,page.allowedHosts={tq.example},"
    "checkpoint.enabled=true,checkpoint.persistence.enabled=true,monitoring.labels.release=prometheus",
)
DAEMON_SET = (
    "--set", "storage.kind=DaemonSet,storage.replicas=1,storage.hostNetwork=true,sharedMemory.hostPath=/run/tq_service"
)  # fmt: skip
HA = ("--values", "values-ha.yaml")
HA_ALL = (
    "--set",
    "controller.readiness=member,journal.cluster=runs,journal.tlsSecretName=etcd-tls,journal.clientCertificate=true,"
    "journal.user=tq,journal.passwordSecretName=etcd-user,mirror.url=mooncake://master:50051,mirror.secretName=engine,"
    "mirror.copies=2,mirror.required=0,mirror.offeredGiB=8,storage.memoryGiB=41,"
    "checkpoint.enabled=true,checkpoint.existingClaim=checkpoints",
)
PROFILES = {"single": (), "storage": STORAGE, "ha": HA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Manifests that are looked at.

    Attributes:
        name: of the case.
        arguments: those of helm.
    """

    name: str
    arguments: tuple[str, ...]

    @functools.cache  # noqa: B019  (cases last as long as the tests)
    def manifests(self) -> list[Manifest]:
        """Return them, in the order of the file; not to be changed."""
        return load(template(*self.arguments))


def cases() -> Iterator[Any]:
    for profile, arguments in PROFILES.items():
        for name, further in {
            "insecure": INSECURE,
            "secured": SECURED,
            "all": (*INSECURE, *ALL),
            "all-secured": (*SECURED, *ALL),
        }.items():
            case = Case(name=f"{profile}-{name}", arguments=(*arguments, *further))
            yield pytest.param(case, id=case.name, marks=needs_helm)
    case = Case(name="ha-engines-secured", arguments=(*HA, *SECURED, *HA_ALL))
    yield pytest.param(case, id=case.name, marks=needs_helm)
    case = Case(name="daemon-set", arguments=(*STORAGE, *INSECURE, *DAEMON_SET))
    yield pytest.param(case, id=case.name, marks=needs_helm)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], cwd=CHART, capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def template(*arguments: str) -> str:
    """Return what helm renders.

    Raises:
        ValueError: helm refuses the values.
    """
    done = run_helm("template", "tq-service", ".", "--namespace", "tq", *arguments)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def load(text: str) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    return [document for document in yaml.load_all(text, loader) if document is not None]


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield what has pods, and the template (or the pod itself)."""
    for manifest in manifests:
        match manifest["kind"]:
            case "Pod":
                yield manifest, manifest
            case "StatefulSet" | "DaemonSet" | "Deployment":
                yield manifest, manifest["spec"]["template"]
            case "CronJob":
                yield manifest, manifest["spec"]["jobTemplate"]["spec"]["template"]


def services(manifests: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """Return what runs `serve`: the manifest and its pod's spec."""
    found = [(manifest, pod["spec"]) for manifest, pod in pods(manifests)]
    return [(manifest, spec) for manifest, spec in found if container(spec)["args"] == ["serve"]]


def container(spec: Manifest) -> Manifest:
    (only,) = spec["containers"]
    return only


def environment(spec: Manifest, pod_name: str, namespace: str = "tq") -> dict[str, str]:
    """Return the variables of a pod's container as Kubernetes resolves them: $(NAME) looks back only."""
    fields = {
        "metadata.name": pod_name,
        "metadata.namespace": namespace,
        "spec.nodeName": "node-7",
        "status.podIP": "10.0.0.7",
    }
    resolved: dict[str, str] = {}
    for variable in container(spec)["env"]:
        if "valueFrom" in variable:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: resolved[found[1]], variable["value"])
        assert variable["name"] not in resolved
        resolved[variable["name"]] = value
    return resolved


def addresses(manifests: list[Manifest]) -> str:
    """Return where controllers have to be looked for: at the Service of one, by the names of the pods of several."""
    (controllers,) = [each for each, spec in services(manifests) if environment(spec, "pod")["TQ_ROLE"] != "storage"]
    name, count = controllers["metadata"]["name"], controllers["spec"]["replicas"]
    if count == 1:
        return f"{name.removesuffix('-controller')}.tq.svc:50051"
    return ",".join(f"{name}-{number}.{controllers['spec']['serviceName']}.tq.svc:50051" for number in range(count))


def has_labels(manifest: Manifest, selector: Manifest) -> bool:
    """Whether a selector of Kubernetes chooses what has the metadata of this."""
    labels = manifest["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


def parsed_command(arguments: list[str]) -> typer.Context:
    """Return the context of a command line; raises where an argument is not known."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("tq-service", list(arguments))
    rest = list(arguments)
    while hasattr(command, "resolve_command"):  # groups have no options of their own
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)
    return context


def variables_of(context: typer.Context) -> set[str]:
    """Return the variables that a command takes its options from."""
    params = context.command.params
    return {str(each.envvar) for each in params} | set(
        re.findall(r"env var: (TQ_\w+)", " ".join(str(each.help) for each in params if isinstance(each, TyperOption)))
    )
