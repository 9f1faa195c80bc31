"""Manifests that helm renders from the chart: valid, and the service runs with them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from manifests import (
    ALL,
    CHART,
    INSECURE,
    KUBERNETES,
    PROFILES,
    Case,
    Manifest,
    addresses,
    cases,
    container,
    environment,
    has_labels,
    load,
    needs_helm,
    parsed_command,
    pods,
    program,
    services,
    template,
    variables_of,
)

from tq_service.config import ServeSettings, load_settings

KUBECTL = shutil.which("kubectl")
VARIABLES = {f"TQ_{name.upper()}" for name in ServeSettings.model_fields}

each_case = pytest.mark.parametrize("case", list(cases()))


@pytest.fixture(scope="module")
def schemas() -> ModuleType:
    """The module that validates manifests; slow to import, which every process that collects tests would pay for."""
    return importlib.import_module("kubernetes_schemas")


@pytest.mark.parametrize("version", ["1.29", pytest.param("1.33", marks=pytest.mark.nightly), "1.36"])
@each_case
def test_each_object_is_valid_for_kubernetes(schemas: ModuleType, case: Case, version: str) -> None:
    manifests = case.manifests()
    assert len(manifests) >= 6
    for manifest in manifests:
        schemas.validate(manifest, version)


def test_the_check_of_objects_finds_an_unknown_field(schemas: ModuleType) -> None:
    (manifest, *_) = load((KUBERNETES / "engines/valkey.yaml").read_text())
    manifest |= {"replicas": 1}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(manifest, "1.36")


@each_case
def test_names_are_there_once_and_in_no_namespace_of_their_own(case: Case) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in case.manifests()]
    assert len(set(names)) == len(names)
    assert not [manifest for manifest in case.manifests() if "namespace" in manifest["metadata"]]


@each_case
def test_each_service_starts_with_the_settings_it_is_given(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        monkeypatch.delenv(name)
    roles = set()
    for manifest, spec in services(case.manifests()):
        given = environment(spec, f"{manifest['metadata']['name']}-0")
        assert {name for name in given if name.startswith("TQ_")} <= VARIABLES
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            settings = load_settings({}).settings
        roles.add(settings.role)
        assert settings.host == "0.0.0.0"
        assert settings.is_secured != settings.insecure
        assert spec["terminationGracePeriodSeconds"] > settings.grace_seconds
        assert settings.metrics_port in {None, 9464}
        if settings.role != "controller":
            assert settings.max_bytes is not None
            assert settings.bulk_address(settings.bulk_port) == ":50052"
        resources = container(spec)["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        memory_bytes = int(resources["limits"]["memory"].removesuffix("Gi")) * 2**30
        stored = 0 if settings.role == "controller" else settings.max_bytes or 0
        assert memory_bytes >= stored + settings.mirror_offered_bytes + 2**30
        if settings.role != "storage":  # the largest samples that were measured, see docs/performance.md
            assert settings.max_samples * 573 <= memory_bytes - stored - 2**30
        if len(services(case.manifests())) > 1:
            assert settings.internal_secret_file is not None
    assert roles in ({"all"}, {"controller", "storage"})


@each_case
def test_services_are_found_by_what_they_advertise(case: Case) -> None:
    manifests = case.manifests()
    client_services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}
    for manifest, spec in services(manifests):
        name = manifest["metadata"]["name"]
        given = environment(spec, f"{name}-0")
        if "TQ_ADVERTISE" not in given:
            assert given["TQ_ROLE"] == "all" or manifest["spec"]["replicas"] == 1
            continue
        if given["TQ_ROLE"] == "controller":
            assert given["TQ_ADVERTISE"] in addresses(manifests).split(",")
        else:
            assert given["TQ_CONTROLLER"] == addresses(manifests)
        if manifest["kind"] == "DaemonSet":
            assert (given["TQ_STORAGE_ID"], given["TQ_ADVERTISE"]) == ("node-7", "10.0.0.7:50051")
            continue
        headless = client_services[manifest["spec"]["serviceName"]]
        assert headless["clusterIP"] == "None"
        assert headless["publishNotReadyAddresses"] is True
        assert given.get("TQ_STORAGE_ID") == (f"{name}-0" if given["TQ_ROLE"] == "storage" else None)
        assert given["TQ_ADVERTISE"] == f"{name}-0.{manifest['spec']['serviceName']}.tq.svc:50051"


@each_case
def test_commands_and_variables_of_clients_are_such_that_there_are(case: Case) -> None:
    for manifest, pod in pods(case.manifests()):
        context = parsed_command(container(pod["spec"])["args"])
        if context.info_name == "serve":
            continue
        given = environment(pod["spec"], manifest["metadata"]["name"])
        assert {name for name in given if name.startswith("TQ_")} <= variables_of(context)
        assert given["TQ_ADDRESS"] == addresses(case.manifests())


@each_case
def test_pods_are_ready_by_the_service_that_they_are_for(case: Case) -> None:
    for _, spec in services(case.manifests()):
        only = container(spec)
        given = environment(spec, "pod-0")
        name = f"tq_service.v1.{'Storage' if given['TQ_ROLE'] == 'storage' else 'Controller'}Service"
        if case.name == "ha-engines-secured" and given["TQ_ROLE"] == "controller":
            name = ""  # controller.readiness is member
        asked = {}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = only[kind]
            if "TQ_TLS_CERT" in given and kind != "readinessProbe":
                assert probe["tcpSocket"] == {"port": "grpc"}  # an expired certificate restarts no pod
                asked[kind] = ""
            elif "TQ_TLS_CERT" in given:
                program, *arguments = probe["exec"]["command"]
                assert program == "tq-service"
                context = parsed_command(arguments)
                asked[kind] = context.params["service"]
                assert context.params["timeout"] < probe["timeoutSeconds"]
            else:
                assert probe["grpc"]["port"] == 50051
                asked[kind] = probe["grpc"]["service"]
        assert asked == {"startupProbe": "", "readinessProbe": name, "livenessProbe": ""}
        assert only["startupProbe"]["periodSeconds"] * only["startupProbe"]["failureThreshold"] >= 60


@each_case
def test_storage_services_have_their_bulk_port_and_controllers_none(case: Case) -> None:
    for _, spec in services(case.manifests()):
        given = environment(spec, "pod-0")
        ports = {each["name"]: each["containerPort"] for each in container(spec)["ports"]}
        assert ports["grpc"] == 50051
        if given["TQ_ROLE"] == "controller":
            assert "bulk" not in ports
            assert "TQ_BULK_PORT" not in given
        else:
            assert str(ports["bulk"]) == given["TQ_BULK_PORT"] == "50052"


@each_case
def test_each_path_is_in_a_volume_that_there_is(case: Case) -> None:
    for manifest, pod in pods(case.manifests()):
        spec = pod["spec"]
        only = container(spec)
        claims = {each["metadata"]["name"]: each["spec"] for each in manifest["spec"].get("volumeClaimTemplates", ())}
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        mounts = {each["mountPath"]: each for each in only.get("volumeMounts", ())}
        assert {each["name"] for each in mounts.values()} == volumes.keys() | claims.keys()
        for name, value in environment(spec, "pod-0").items():
            if name.startswith("TQ_") and value.startswith("/"):
                assert any(Path(value).is_relative_to(path) for path in mounts), f"{name}={value}"
            if name in {"TQ_DATA_DIR", "TQ_CHECKPOINT_DIR"}:
                place = mounts[value]["name"]
                assert place in claims or "persistentVolumeClaim" in volumes[place]
        for claim in claims.values():
            assert claim["accessModes"] == ["ReadWriteOncePod"]
        if "data" in claims and (quota := environment(spec, "pod-0").get("TQ_MAX_BYTES")):
            size = claims["data"]["resources"]["requests"]["storage"]
            assert int(size.removesuffix("Gi")) > int(quota.removesuffix("GiB"))


@each_case
def test_secrets_are_named_and_nowhere_written_out(case: Case) -> None:
    manifests = case.manifests()
    assert "Secret" not in {manifest["kind"] for manifest in manifests}
    for _, pod in pods(manifests):
        only = container(pod["spec"])
        assert [each["name"] for each in only["env"] if re.search(r"TOKEN$|PASSWORD$|SECRET$", each["name"])] == []
        secrets = {each["name"] for each in pod["spec"].get("volumes", ()) if "secret" in each}
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440  # others must not read them, the group 10001 may
        for mount in only.get("volumeMounts", ()):
            assert "subPath" not in mount  # such files would not follow a change
            assert mount.get("readOnly", False) is (mount["name"] in secrets)


@each_case
def test_no_pod_has_a_right_that_it_does_not_need(case: Case) -> None:
    for _, pod in pods(case.manifests()):
        spec = pod["spec"]
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container(spec)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container(spec)["resources"].keys()


@each_case
def test_what_chooses_pods_finds_them_and_their_ports(case: Case) -> None:
    manifests = case.manifests()
    templates = [pod for _, pod in pods(manifests)]
    chosen = [pod for manifest, pod in pods(manifests) if container(pod["spec"])["args"] == ["serve"]]
    for manifest, pod in pods(manifests):
        if "selector" in manifest["spec"]:
            assert has_labels(pod, manifest["spec"]["selector"])
    for manifest in manifests:
        match manifest["kind"]:
            case "Service":
                found = [pod for pod in templates if has_labels(pod, {"matchLabels": manifest["spec"]["selector"]})]
                assert len(found) == 1, manifest["metadata"]["name"]
                ports = {each["name"]: each["containerPort"] for each in container(found[0]["spec"])["ports"]}
                for port in manifest["spec"]["ports"]:
                    assert (port["name"], port["port"]) == (port["targetPort"], ports[port["targetPort"]])
                # A client that reaches a storage service through this one reaches its bulk port, too.
                assert ("bulk" in {each["name"] for each in manifest["spec"]["ports"]}) == ("bulk" in ports)
            case "PodDisruptionBudget":
                assert len([pod for pod in templates if has_labels(pod, manifest["spec"]["selector"])]) == 1
            case "NetworkPolicy" if manifest["metadata"]["name"] in {"tq-service-etcd", "tq-service-engine"}:
                assert not [pod for pod in templates if has_labels(pod, manifest["spec"]["podSelector"])]
                (rule,) = manifest["spec"]["ingress"]
                taken = [pod for pod in templates for each in rule["from"] if has_labels(pod, each["podSelector"])]
                assert [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in taken] == [
                    "controller" if manifest["metadata"]["name"].endswith("etcd") else "storage"
                ]
            case "NetworkPolicy":
                opened = [{each["port"] for each in rule.get("ports", ())} for rule in manifest["spec"]["ingress"]]
                assert all(("grpc" in ports) == ("bulk" in ports) for ports in opened)
                found = [pod for pod in templates if has_labels(pod, manifest["spec"]["podSelector"])]
                assert found == chosen or [container(pod["spec"])["name"] for pod in found] == ["page"]
            case "ServiceMonitor":
                scraped = [each for each in manifests if each["kind"] == "Service"]
                scraped = [each for each in scraped if has_labels(each, manifest["spec"]["selector"])]
                assert len(scraped) == len(chosen)
                (endpoint,) = manifest["spec"]["endpoints"]
                assert all(endpoint["port"] in {port["name"] for port in each["spec"]["ports"]} for each in scraped)


@each_case
def test_a_connection_needs_a_rule_that_names_where_it_comes_from(case: Case) -> None:
    policies = [manifest["spec"] for manifest in case.manifests() if manifest["kind"] == "NetworkPolicy"]
    assert policies
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy["ingress"]:
            assert rule["from"]
            assert all(each.get("namespaceSelector", {"matchLabels": 1}) != {} for each in rule["from"])
            if "ports" not in rule:  # engines choose ports of their own; but then single pods are named
                assert all(each["podSelector"]["matchLabels"] for each in rule["from"])


@needs_helm
@pytest.mark.parametrize("profile", PROFILES)
def test_alerts_and_dashboard_are_those_of_the_repository(profile: str) -> None:
    manifests = {each["kind"]: each for each in load(template(*PROFILES[profile], *INSECURE, *ALL))}
    assert manifests["PrometheusRule"]["spec"] == yaml.safe_load((CHART / "files/alerts.yml").read_text())
    dashboard = json.loads(manifests["ConfigMap"]["data"]["tq_service.json"])
    assert dashboard == json.loads((CHART / "files/tq_service.json").read_text())
    relabeled = manifests["ServiceMonitor"]["spec"]["endpoints"][0]["relabelings"]
    assert relabeled == [{"targetLabel": "job", "replacement": "tq-service"}]  # which alerts and dashboard ask for


# For kustomize


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/kubernetes after `make manifests`."""
    directory = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(KUBERNETES, directory, ignore=shutil.ignore_patterns("tq-service.yaml"))
    renderer = program("render_chart")
    renderer.RENDERED = directory
    assert renderer.main(["--manifests"]) == 0
    return directory


@needs_helm
@pytest.mark.parametrize("name", program("render_chart").RENDERINGS)
def test_kustomizations_name_rendered_manifests_and_their_image(rendered: Path, name: str) -> None:
    directory = rendered / name
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    expected = {"apiVersion", "kind", "namespace", "resources", "images"}
    assert kustomization.keys() == expected
    assert kustomization["namespace"] == "tq"
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        manifests += load((directory / resource).read_text())
    images = {container(pod["spec"])["image"].partition(":")[0] for _, pod in pods(manifests)}
    assert images == {each["name"] for each in kustomization["images"]}
    assert "ServiceMonitor" not in {manifest["kind"] for manifest in manifests}  # which needs a CRD
    managers = {each["metadata"]["labels"]["app.kubernetes.io/managed-by"] for each in manifests}
    assert managers == {"kustomize"}


@pytest.mark.parametrize("version", ["1.29", "1.36"])
@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("engines/[ev]*.yaml")), ids=lambda path: path.stem)
def test_examples_of_engines_are_valid_for_kubernetes(schemas: ModuleType, path: Path, version: str) -> None:
    manifests = load(path.read_text())
    for manifest in manifests:
        schemas.validate(manifest, version)
    ((_, pod),) = pods(manifests)
    assert container(pod["spec"])["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    values = yaml.safe_load((CHART / "values-ha.yaml").read_text())
    # values-ha.yaml names them without a namespace, so they are where the chart's page installs it.
    assert yaml.safe_load((path.parent / "kustomization.yaml").read_text())["namespace"] == "tq"
    assert set(re.findall(r"--namespace (\S+)", (CHART / "README.md").read_text())) == {"tq"}
    closed = [values["networkPolicy"][name] for name in ("etcdPodLabels", "enginePodLabels")]
    assert pod["metadata"]["labels"] in closed


@needs_helm
@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")))
def test_kubectl_builds_the_kustomizations(schemas: ModuleType, rendered: Path, name: str) -> None:
    assert KUBECTL is not None
    directory = rendered / name
    done = subprocess.run(
        [KUBECTL, "kustomize", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    built = load(done.stdout)
    names = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    assert len(built) == sum(len(load((directory / name).read_text())) for name in names)
    assert {each["metadata"]["namespace"] for each in built} == {"tq"}
    for manifest in built:
        schemas.validate(manifest, "1.36")
