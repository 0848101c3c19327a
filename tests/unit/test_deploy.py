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

from flexcache.config import CacheConfig, RouterConfig, ServerConfig
from flexcache.ids import __version__
from flexcache.router.fleet import EventSource
from flexcache.router.listing import parse_options

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CUSTOM = {
    "ServiceMonitor",
    "InferencePool",
    "HTTPRoute",
}  # Kubernetes itself has no schema for these


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
    assert len(of_kind("Deployment")) == 3
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


# -- the router -----------------------------------------------------------------------------------


def named(kind: str, name: str) -> dict[str, Any]:
    return next(each for each in of_kind(kind) if each["metadata"]["name"] == name)


def router_environment() -> dict[str, str]:
    """The variables of the router's container, expanded as Kubernetes does."""
    (container,) = containers(named("Deployment", "flexcache-router"))
    special = {"NAMESPACE": "prod", "FLEXCACHE_ROUTER_CONTROL_TOKEN": "token"}
    given = {
        each["name"]: each.get("value", special.get(each["name"])) for each in container["env"]
    }
    return {name: value.replace("$(NAMESPACE)", "prod") for name, value in given.items()}


def test_the_routers_settings_are_valid_and_name_the_engines() -> None:
    config = RouterConfig.load(None, router_environment())
    listing = parse_options(config.workers, config.events)
    ((entry, url),) = listing.groups()
    assert (url.group, url.host) == ("k8s", "vllm-engines.prod")
    service = named("Service", "vllm-engines")["spec"]
    engine = named("Deployment", "vllm-flexcache")
    assert service["selector"].items() <= engine["spec"]["template"]["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == url.port
    (spec,) = listing.specs_of(entry, url.member("10.0.0.7"))
    assert spec.url == "http://10.0.0.7:8000"
    (container,) = containers(engine)
    events = json.loads(container["args"][container["args"].index("--kv-events-config") + 1])
    assert spec.sources == (
        EventSource(
            events["endpoint"].replace("*", "10.0.0.7"),
            events["replay_endpoint"].replace("*", "10.0.0.7"),
        ),
    )


def test_the_routers_ports_are_those_that_it_listens_on() -> None:
    config = RouterConfig.load(None, router_environment())
    (container,) = containers(named("Deployment", "flexcache-router"))
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "openai": config.port, "control": config.control_port, "ext-proc": config.gateway_port,
    }  # fmt: skip
    service = named("Service", "flexcache-router")["spec"]["ports"]
    assert {each["targetPort"]: each["port"] for each in service} == ports
    picker = named("InferencePool", "vllm-flexcache")["spec"]["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == ("flexcache-router", config.gateway_port)


def test_the_router_may_watch_what_it_watches() -> None:
    rules = named("Role", "flexcache-router")["rules"]
    assert rules == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    pod = named("Deployment", "flexcache-router")["spec"]["template"]["spec"]
    account = named("ServiceAccount", "flexcache-router")["metadata"]
    (subject,) = named("RoleBinding", "flexcache-router")["subjects"]
    assert pod["serviceAccountName"] == account["name"] == subject["name"]


def test_variables_of_services_are_not_taken_for_settings() -> None:
    for deployment in of_kind("Deployment"):
        assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_envoys_names_are_those_of_the_services() -> None:
    envoy = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
    addresses = {}
    for cluster in envoy["static_resources"]["clusters"]:
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]
        addresses[cluster["name"]] = (address["address"], address["port_value"])
    assert addresses == {"engines": ("vllm-engines", 8000), "picker": ("flexcache-router", 9002)}
