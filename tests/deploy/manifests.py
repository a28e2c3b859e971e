"""The Kubernetes manifests of deploy/, read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = {"cpu": KUBERNETES / "overlays/cpu", "gpu": KUBERNETES / "overlays/gpu"}
COMPONENTS = ("keda", "inference-pool", "models")

Resource = dict[str, Any]


def read(path: Path) -> list[Resource]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def resources_of(directory: Path) -> list[Resource]:
    """Those that its kustomization lists as files."""
    (kustomization,) = read(directory / "kustomization.yaml")
    files = [directory / name for name in kustomization["resources"]]
    return [document for file in files if file.is_file() for document in read(file)]


def settings_of(directory: Path) -> dict[str, str]:
    """The ConfigMap's entries that a kustomization generates."""
    (kustomization,) = read(directory / "kustomization.yaml")
    literals = [
        literal
        for generator in kustomization.get("configMapGenerator", ())
        for literal in generator["literals"]
    ]
    return dict(literal.split("=", 1) for literal in literals)


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name)
    return found


def containers(workload: Resource) -> dict[str, Resource]:
    """By name, sidecars included."""
    spec = workload["spec"]["template"]["spec"]
    every = [*spec.get("initContainers", ()), *spec["containers"]]
    return {container["name"]: container for container in every}


def kustomize() -> list[str] | None:
    """The command that renders a directory, where there is one."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def render(directory: Path) -> list[Resource]:
    command = kustomize()
    assert command is not None
    ended = subprocess.run(
        [*command, str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [document for document in yaml.safe_load_all(ended.stdout) if document]
