"""The files in deploy/ are valid and agree with the package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexcache.config import CacheConfig, ServerConfig
from flexcache.version import __version__

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CUSTOM = {"ServiceMonitor"}  # Kubernetes itself has no schema for these


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for path in MANIFESTS for each in documents(path) if each["kind"] == kind]


def containers(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    pod = deployment["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for document in documents(path):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(
                document, kubernetes_validate.latest_version(), strict=True
            )


def test_the_dockerfile_passes_hadolint() -> None:
    program = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which(
        "hadolint"
    )
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_settings_in_config_maps_are_valid(tmp_path: Path) -> None:
    maps = [config_map["data"] for config_map in of_kind("ConfigMap")]
    assert len(maps) == 2
    for data in maps:
        token, directory = {"FLEXCACHE_HTTP_TOKEN": "token"}, {"ssd_cache_dirs": [str(tmp_path)]}
        if "cache.toml" in data:
            file = tmp_path / "cache.toml"
            file.write_text(data["cache.toml"])
            config = ServerConfig.load(
                str(file), token, default_endpoint="ipc:///unused", **directory
            ).cache
        else:
            config = CacheConfig.from_env({**data, **token}, **directory)
        assert config.has_ssd_tier


def test_engines_load_the_connector_and_recompute_lost_blocks() -> None:
    engines = [
        each for deployment in of_kind("Deployment") for each in containers(deployment)
        if "args" in each
    ]  # fmt: skip
    assert len(engines) == 3
    for engine in engines:
        transfer = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "FlexCacheConnectorV1",
            "kv_connector_module_path": "flexcache.integration.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }


def test_images_have_the_version_of_the_package() -> None:
    for deployment in of_kind("Deployment"):
        for container in containers(deployment):
            assert container["image"] == f"flexcache-vllm:{__version__}"


def test_mounted_volumes_are_defined() -> None:
    for deployment in of_kind("Deployment"):
        defined = {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        mounted = {
            mount["name"] for each in containers(deployment) for mount in each["volumeMounts"]
        }
        assert mounted == defined
