"""The files in deploy/ are valid and agree with the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexcache.config import CacheConfig, RouterConfig, ServerConfig
from flexcache.counters import families
from flexcache.ids import __version__
from flexcache.router.fleet import EventSource
from flexcache.router.listing import parse_options
from flexcache.router.stats import RouterStats

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CUSTOM = {
    "ServiceMonitor",
    "InferencePool",
    "HTTPRoute",
    "ScaledObject",
}  # Kubernetes itself has no schema for these


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for path in MANIFESTS for each in documents(path) if each["kind"] == kind]


def containers(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    pod = deployment["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def validate(documents: list[dict[str, Any]]) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for document in documents:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(
                document, kubernetes_validate.latest_version(), strict=True
            )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    validate(documents(path))


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


def router_environment(deployment: dict[str, Any] | None = None) -> dict[str, str]:
    """The variables of the router's container, expanded as Kubernetes does."""
    (container,) = containers(deployment or named("Deployment", "flexcache-router"))
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


def test_the_autoscalers_ask_for_what_the_router_tells() -> None:
    recipe = (DEPLOY.parent / "docs" / "operate" / "router.md").read_text()
    (hpa,) = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", recipe, re.DOTALL))
    validate([hpa])
    (trigger,) = named("ScaledObject", "vllm-flexcache")["spec"]["triggers"]
    asked = re.findall(r"(flexcache_\w+)\{at=\"(\w+)\"", trigger["metadata"]["query"])
    name = hpa["spec"]["metrics"][0]["external"]["metric"]["name"]
    assert asked == [(name, place) for place in ("engines", "router")]
    (told,) = (each for each in families(RouterStats) if each.name == name)
    assert told.labels == ("at",)


# -- the chart ------------------------------------------------------------------------------------

CHART = DEPLOY / "helm" / "flexcache"
HELM = os.environ.get("HELM_SDK_PATH")
_RENDER = """
import json, sys
import helm_python
chart, name, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with helm_python.Chart.load(chart) as loaded:
    rendered = loaded.render(values, name=name, namespace="prod")
json.dump({"lint": helm_python.lint(chart, values, strict=True), "files": rendered}, sys.stdout)
"""
EVERYTHING = {"serviceMonitor": True, "inferencePool": True, "autoscaling": {"enabled": True}}


def rendered(name: str, **values: Any) -> list[dict[str, Any]]:
    """Return what Helm makes of the chart; it must find no fault with it.

    In a process of its own: Helm brings Go's threads and signal handlers along.
    """
    if HELM is None:
        pytest.skip("HELM_SDK_PATH names no Helm (`scripts/test.sh all` fetches it)")
    done = subprocess.run(
        [sys.executable, "-c", _RENDER, str(CHART), name, json.dumps(values)],
        env={**os.environ, "PYTHONPATH": HELM}, capture_output=True, check=True,
    )  # fmt: skip
    made = json.loads(done.stdout)
    assert not made["lint"]["errors"]
    assert all(message["severity"] < 2 for message in made["lint"]["messages"])
    found = [each for text in made["files"].values() for each in yaml.safe_load_all(text)]
    return [each for each in found if each]


def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_the_chart_is_the_manifests() -> None:
    names = {
        "r-vllm": "vllm-flexcache", "r-engines": "vllm-engines", "r-router": "flexcache-router",
        '"r"': '"flexcache"',
    }  # fmt: skip
    made = json.dumps(rendered("r", **EVERYTHING))
    for ours, theirs in names.items():
        made = made.replace(ours, theirs)
    chart = by_name(json.loads(made))
    manifests = {
        key: each
        for key, each in by_name([e for path in MANIFESTS for e in documents(path)]).items()
        if "shared" not in key[1]
    }
    # An autoscaler sets the number of engines.
    assert manifests["Deployment", "vllm-flexcache"]["spec"].pop("replicas") == 1
    # The manifests' is for the shared cache, too.
    for found in (chart, manifests):
        found.pop(("ServiceMonitor", "flexcache"))
    assert chart == manifests


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, {"Deployment": 2, "NetworkPolicy": 1, "ServiceMonitor": 0, "ScaledObject": 0}),
        ({"router": {"enabled": False}, **EVERYTHING},
         {"Deployment": 1, "NetworkPolicy": 0, "InferencePool": 0, "ScaledObject": 0, "Role": 0}),
        ({"cache": {"ssdGb": 0, "settings": {"FLEXCACHE_REMOTE_URL": "mooncake://m:50051"}},
          "engine": {"args": ["--max-model-len=32768"], "replicas": 3},
          "router": {"settings": {"FLEXCACHE_ROUTER_MAX_REQUESTS_PER_WORKER": 64}}},
         {"Deployment": 2}),
    ],
)  # fmt: skip
def test_any_values_make_valid_objects(values: dict[str, Any], kinds: dict[str, int]) -> None:
    made = rendered("llama", **values)
    validate(made)
    count = [each["kind"] for each in made].count
    assert {kind: count(kind) for kind in kinds} == kinds
    found = by_name(made)
    data = found["ConfigMap", "llama"]["data"]
    if "FLEXCACHE_SSD_CACHE_DIRS" in data:
        data["FLEXCACHE_SSD_CACHE_DIRS"] = "/tmp"
    config = CacheConfig.from_env({**data, "FLEXCACHE_HTTP_TOKEN": "t"})
    assert config.has_ssd_tier == (values.get("cache", {}).get("ssdGb") != 0)
    assert config.remote_url == data.get("FLEXCACHE_REMOTE_URL")
    engine = found["Deployment", "llama-vllm"]["spec"]
    pod = engine["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    wanted = values.get("engine", {})
    assert set(wanted.get("args", ())) <= set(pod["containers"][0]["args"])
    assert engine.get("replicas", 1) == wanted.get("replicas", 1)
    if ("Deployment", "llama-router") in found:
        given = router_environment(found["Deployment", "llama-router"])
        settings = RouterConfig.load(None, given)
        ((_, url),) = parse_options(settings.workers, settings.events).groups()
        assert url.host == "llama-engines.prod"
        assert settings.max_requests_per_worker == (64 if "engine" in values else None)
