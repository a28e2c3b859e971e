"""The Kubernetes manifests: valid by Kubernetes' own schemas, and one with settings and image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from pagewire.config import EngineConfig, FrontendConfig, TokenizerConfig
from pagewire.obs import probe
from pagewire.settings import load_config
from tests.deploy.manifests import (
    BASE,
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Resource,
    containers,
    kustomize,
    named,
    read,
    render,
    resources_of,
    settings_of,
)

if TYPE_CHECKING:
    from pathlib import Path

# Native sidecars have been on by default since the first.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
ROOMS = {
    "frontend": FrontendConfig,
    "tokenizer_svc": TokenizerConfig,
    "engine_core": EngineConfig,
}
SPARE_S = 15
"""For the sidecar, which ends after the frontend."""
# Their schemas are not Kubernetes' own: what the CRDs require and know, of what is used here.
CUSTOM = {
    "keda.sh/v1alpha1 ScaledObject": (
        {"scaleTargetRef", "triggers"},
        {"minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"}
        | {"fallback", "advanced"},
    ),
    "inference.networking.k8s.io/v1 InferencePool": (
        {"selector", "targetPorts", "endpointPickerRef"},
        {"appProtocol"},
    ),
}

needs_kustomize = pytest.mark.skipif(
    kustomize() is None, reason="neither kustomize nor kubectl here: overlays are not rendered"
)


@pytest.fixture(scope="module")
def base() -> list[Resource]:
    return resources_of(BASE)


@pytest.fixture(scope="module")
def engine(base: list[Resource]) -> Resource:
    return named(base, "StatefulSet", "pagewire-engine")


@pytest.fixture(scope="module")
def frontend(base: list[Resource]) -> Resource:
    return named(base, "Deployment", "pagewire-frontend")


def kind_of(resource: Resource) -> str:
    return f"{resource['apiVersion']} {resource['kind']}"


def check_schema(resource: Resource) -> None:
    if kind_of(resource) in CUSTOM:
        required, known = CUSTOM[kind_of(resource)]
        assert required <= set(resource["spec"]) <= required | known
        return
    for version in VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)


def labels_of(workload: Resource) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def config_of(container: Resource, environment: dict[str, str], patch: Any) -> Any:
    """As the container's process would read it: unknown settings and bad values are errors."""
    python, isolated, dash_m, module = container["command"]
    assert (python, isolated, dash_m) == ("python", "-P", "-m")
    for name, value in environment.items():
        patch.setenv(name, value)
    flags = [flag.replace("$(POD_IP)", "10.0.0.1") for flag in container["args"]]
    return load_config(ROOMS[module], flags)


# Schemas.


@pytest.mark.parametrize("directory", [BASE, *(KUBERNETES / "components" / c for c in COMPONENTS)])
def test_every_resource_has_its_schema(directory: Path) -> None:
    resources = resources_of(directory)
    assert resources
    for resource in resources:
        check_schema(resource)


def test_the_schemas_refuse_what_is_not_theirs(engine: Resource) -> None:
    wrong = {**engine, "spec": {**engine["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        check_schema(wrong)


@needs_kustomize
@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_with_all_components_is_valid(name: str, tmp_path: Path) -> None:
    overlay = OVERLAYS[name]
    # kustomize takes relative paths only, below a root of its own.
    up = "/".join([".."] * (len(tmp_path.resolve().parts) - 1))
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{up}{overlay}"],
        "components": [f"{up}{KUBERNETES}/components/{component}" for component in COMPONENTS],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    resources = render(tmp_path)
    for resource in resources:
        check_schema(resource)
    spec = named(resources, "StatefulSet", "pagewire-engine")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    limits = container["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == (name == "gpu")
    assert container["volumeMounts"][0]["name"] == spec["volumes"][0]["name"]
    settings = settings_of(BASE) | settings_of(overlay)
    assert container["envFrom"][0]["configMapRef"]["name"] in {
        r["metadata"]["name"]
        for r in resources
        if r["kind"] == "ConfigMap" and r["data"] == settings
    }


# Settings.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_flag_and_variable_is_a_setting(
    overlay: str, engine: Resource, frontend: Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = settings_of(BASE) | settings_of(OVERLAYS[overlay])
    for workload in (engine, frontend):
        for container in containers(workload).values():
            config_of(container, environment, monkeypatch)


def test_ports_are_those_that_the_rooms_have(
    base: list[Resource], engine: Resource, frontend: Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {
        name: config_of(container, {}, monkeypatch)
        for workload in (engine, frontend)
        for name, container in containers(workload).items()
    }
    commands = int(room["engine"].engine_bind.rpartition(":")[2])
    outputs = int(room["frontend"].outputs_bind.rpartition(":")[2])
    assert f"{commands}" == EngineConfig().engine_bind.rpartition(":")[2]
    assert f"{outputs}" == FrontendConfig().outputs_bind.rpartition(":")[2]
    assert room["frontend"].outputs_advertise == f"tcp://10.0.0.1:{outputs}"
    assert room["frontend"].tokenizer_address == room["tokenizer"].tokenizer_bind
    assert room["frontend"].engine_address == f"dns+tcp://pagewire-engine:{commands}"
    front = {"grpc": room["frontend"].port, "http": room["frontend"].http_port}
    assert declared(engine, "engine") == {"commands": commands}
    assert declared(frontend, "frontend") == front
    assert containers(frontend)["frontend"]["readinessProbe"]["grpc"]["port"] == front["grpc"]
    assert labels_of(frontend).items() >= {"app.kubernetes.io/component": "frontend"}.items()
    for service in (r for r in base if r["kind"] == "Service"):
        assert service["spec"]["clusterIP"] == "None"
        known = {"commands": commands, **front}
        for port in service["spec"]["ports"]:
            assert known[port["targetPort"]] == port["port"]


def declared(workload: Resource, container: str) -> dict[str, int]:
    ports = containers(workload)[container]["ports"]
    return {port["name"]: port["containerPort"] for port in ports}


def test_the_engine_wire_is_between_engines_and_frontends_only(
    base: list[Resource], engine: Resource, frontend: Resource
) -> None:
    policies = {
        name: named(base, "NetworkPolicy", f"pagewire-{name}")["spec"]
        for name in ("engine", "frontend")
    }
    of = {"engine": {"matchLabels": labels_of(engine)}}
    of["frontend"] = {"matchLabels": labels_of(frontend)}
    (inward,) = policies["engine"]["ingress"]
    assert policies["engine"]["podSelector"] == of["engine"]
    assert inward["from"] == [{"podSelector": of["frontend"]}]
    assert [port["port"] for port in inward["ports"]] == [5557]
    (outward,) = policies["engine"]["egress"]
    public, outputs = policies["frontend"]["ingress"]
    assert outward == {"to": [{"podSelector": of["frontend"]}], "ports": outputs["ports"]}
    assert outputs["from"] == [{"podSelector": of["engine"]}]
    assert {port["port"] for port in public["ports"]} == {50051, 8000}
    (ports,) = outputs["ports"]
    assert ports["port"] == 5558
    # While pods are replaced there are ports for the old and for the new ones.
    assert ports["endPort"] - ports["port"] + 1 >= 2 * scaled()["spec"]["maxReplicaCount"]


def scaled() -> Resource:
    (resource,) = resources_of(KUBERNETES / "components/keda")
    return resource


# The life of a pod.


def test_a_pod_has_the_time_that_its_drain_takes(
    frontend: Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = containers(frontend)["frontend"]
    config = config_of(container, {}, monkeypatch)
    patience = frontend["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert patience >= config.drain_grace + config.drain_timeout + SPARE_S
    readiness = container["readinessProbe"]
    noticed = (
        readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    )
    assert config.drain_grace > noticed
    # The tokenizer must outlive the streams that drain.
    assert containers(frontend)["tokenizer"]["restartPolicy"] == "Always"


def test_exec_probes_are_commands_that_the_image_has(
    engine: Resource, frontend: Resource, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        (container, container[name]["exec"]["command"])
        for workload in (engine, frontend)
        for container in containers(workload).values()
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
        if "exec" in container.get(name, {})
    ]
    assert len(commands) == 4
    monkeypatch.setattr(probe, "check_grpc", lambda connection: f"asked {connection.address}")
    for container, command in commands:
        assert command[:4] == ["python", "-P", "-m", "pagewire.obs.probe"]
        # 1: it understood the question, and the answer is no. 2: wrong usage.
        assert probe.main(command[4:]) == 1
        # It asks for what this container's own flags say.
        assert any(flag.endswith(f"={command[-1]}") for flag in container["args"])


def test_images_and_users_are_those_of_the_dockerfile(engine: Resource, frontend: Resource) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    on_gpu = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]["engine"]
    (uid,) = re.findall(r"useradd --uid (\d+)", (ROOT / "Dockerfile").read_text())
    for workload in (engine, frontend):
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsUser"] == int(uid)
        assert spec["enableServiceLinks"] is False
        for name, container in containers(workload).items():
            assert container["image"] == compose["x-room"]["image"]
            composed = compose["services"][name]["command"]
            assert container["command"] == composed[:4]
    (patch,) = read(OVERLAYS["gpu"] / "engine.yaml")
    assert containers(patch)["engine"]["image"] == on_gpu["image"]


# What refers to what.


def test_selectors_and_targets_exist(
    base: list[Resource], engine: Resource, frontend: Resource
) -> None:
    labels = [labels_of(engine), labels_of(frontend)]
    for workload in (engine, frontend):
        assert workload["spec"]["selector"]["matchLabels"] == labels_of(workload)
    for kind in ("Service", "PodDisruptionBudget"):
        for resource in (r for r in base if r["kind"] == kind):
            selector = resource["spec"]["selector"]
            assert selector.get("matchLabels", selector) in labels
    (pool,) = resources_of(KUBERNETES / "components/inference-pool")
    assert pool["spec"]["selector"]["matchLabels"] == labels_of(frontend)
    assert pool["spec"]["targetPorts"] == [{"number": FrontendConfig().http_port}]
    assert set(pool["spec"]["endpointPickerRef"]) <= {
        "group",
        "kind",
        "name",
        "port",
        "failureMode",
    }
    scaler = named(base, "HorizontalPodAutoscaler", "pagewire-frontend")["spec"]
    for target in (scaler["scaleTargetRef"], scaled()["spec"]["scaleTargetRef"]):
        named(base, target["kind"], target["name"])
    assert (
        engine["spec"]["serviceName"]
        == named(base, "Service", "pagewire-engine")["metadata"]["name"]
    )


def test_engines_scale_by_a_metric_that_there_is() -> None:
    (trigger,) = scaled()["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    found = re.fullmatch(r"max\(([\w:]+)\)", trigger["metadata"]["query"])
    assert found is not None
    sources = "".join(path.read_text() for path in (ROOT / "frontend").rglob("*.py"))
    assert re.search(rf'_gauge\(\s*"{found[1]}"', sources)


def test_envoy_looks_up_the_headless_services(base: list[Resource]) -> None:
    config = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())
    for cluster in config["static_resources"]["clusters"]:
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]
        service = named(base, "Service", address["address"])
        assert [port["port"] for port in service["spec"]["ports"]] == [address["port_value"]]
