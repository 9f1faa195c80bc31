"""compose.ha.yaml runs what the chart's profile ha renders: the same image, variables and engines."""

from __future__ import annotations

import re
from typing import Any

import yaml
from manifests import HA, INSECURE, KUBERNETES, ROOT, container, environment, load, needs_helm, pods, services, template

ADDRESSES = {"TQ_ADVERTISE", "TQ_CONTROLLER", "TQ_JOURNAL", "TQ_STORAGE_ID", "TQ_ADDRESS", "TQ_CLUSTER"}
"""Of the network that they are in."""
OF_THE_PLACE = {"TQ_MAX_BYTES", "TQ_LOG_FORMAT", "TQ_INTERNAL_SECRET_FILE"}
"""Less memory, logs for reading, and a secret that the controllers make in a volume."""

BY_MEMORY = {"TQ_MAX_SAMPLES"}
"""Of the memory that a pod is given, which containers of Compose share."""

METRICS = {"TQ_METRICS_PORT", "TQ_METRICS_HOST"}
"""Which the chart gives with monitoring.enabled."""


def compose() -> dict[str, Any]:
    """Return the file with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (ROOT / "compose.ha.yaml").read_text())
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def of_role(role: str) -> dict[str, dict[str, Any]]:
    found = compose()["services"].items()
    return {name: each for name, each in found if each.get("environment", {}).get("TQ_ROLE") == role}


@needs_helm
def test_services_get_the_variables_that_the_chart_gives_them() -> None:
    rendered = services(load(template(*HA, *INSECURE)))
    by_role = {environment(spec, "pod")["TQ_ROLE"]: environment(spec, "pod") for _, spec in rendered}
    assert by_role.keys() == {"controller", "storage"}
    for role, chart in by_role.items():
        names = {name for name in chart if name.startswith("TQ_")}
        for name, service in of_role(role).items():
            given = service["environment"]
            assert given.keys() == names - BY_MEMORY | METRICS, name
            for variable in names - ADDRESSES - OF_THE_PLACE - BY_MEMORY:
                assert str(given[variable]) == chart[variable], variable


def test_each_service_is_one_of_those_that_the_others_look_for() -> None:
    controllers = {name: each["environment"] for name, each in of_role("controller").items()}
    storages = {name: each["environment"] for name, each in of_role("storage").items()}
    assert (len(controllers), len(storages)) == (3, 2)
    wanted = [f"{name}:50051" for name in controllers]
    assert [each["TQ_ADVERTISE"] for each in controllers.values()] == wanted
    for name, each in storages.items():
        assert each["TQ_CONTROLLER"].split(",") == wanted
        assert (each["TQ_STORAGE_ID"], each["TQ_ADVERTISE"]) == (name, f"{name}:50051")
    assert compose()["services"]["load"]["environment"]["TQ_ADDRESS"].split(",") == wanted
    volumes = [volume for each in of_role("controller").values() for volume in each["volumes"]]
    own = [volume for volume in volumes if volume.endswith(":/var/lib/tq_service")]
    assert len(set(own)) == 3
    for service in [*of_role("controller").values(), *of_role("storage").values()]:
        assert float(service["stop_grace_period"].removesuffix("s")) > float(service["environment"]["TQ_GRACE_SECONDS"])
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_the_journal_is_in_the_members_of_etcd_that_there_are() -> None:
    members = {name: each for name, each in compose()["services"].items() if name.startswith("etcd")}
    assert len(members) == 3
    for each in of_role("controller").values():
        assert each["environment"]["TQ_JOURNAL"] == f"etcd://{','.join(f'{name}:2379' for name in members)}"
    for name, each in members.items():
        given = each["environment"]
        assert given["ETCD_NAME"] == name
        assert given["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        assert given["ETCD_INITIAL_CLUSTER"] == ",".join(f"{other}=http://{other}:2380" for other in members)
        assert given["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{name}:2380"


def test_engines_are_those_of_the_manifests_with_their_limits() -> None:
    found = compose()["services"]
    for name, service in {"etcd": found["etcd1"], "valkey": found["valkey"]}.items():
        ((_, pod),) = pods(load((KUBERNETES / f"engines/{name}.yaml").read_text()))
        only = container(pod["spec"])
        assert only["image"] == service["image"]
        assert only["command"] == service["command"][:1]
        if name == "valkey":
            arguments, given = [
                dict(zip(flags[::2], flags[1::2], strict=True)) for flags in (only["args"], service["command"][1:])
            ]
            assert arguments.pop("--maxmemory") != given.pop("--maxmemory")  # that of a cluster, and of a trial
            assert arguments == given
        else:
            assert f"--quota-backend-bytes={service['environment']['ETCD_QUOTA_BACKEND_BYTES']}" in only["args"]


def test_nothing_insecure_is_published() -> None:
    assert [name for name, each in compose()["services"].items() if "ports" in each] == []
