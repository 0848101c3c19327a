"""The interface under our TensorRT-LLM tests is that of the real wheel, where there is one."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys

import pytest
from trtllm import INTERFACE

_READ = """
import inspect, json
from flexcache.integration.tensorrt_llm import interface
module = inspect.getmodule(interface.KvCacheConnectorWorker)
found = {}
for name in ("KvCacheConnectorWorker", "KvCacheConnectorScheduler"):
    methods = inspect.getmembers(getattr(module, name), inspect.isfunction)
    found[name] = {method: list(inspect.signature(call).parameters) for method, call in methods}
    found[name]["abstract"] = sorted(getattr(module, name).__abstractmethods__)
for name in ("RequestData", "SchedulerOutput"):
    found[name] = list(inspect.signature(getattr(module, name)).parameters)
print(json.dumps(found))
"""


def test_the_interface_is_that_of_the_installed_tensorrt_llm() -> None:
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("TensorRT-LLM is not installed: its wheel needs CUDA")
    done = subprocess.run([sys.executable, "-c", _READ], capture_output=True, text=True)
    assert done.returncode == 0, f"{version}: {done.stderr}"
    real = json.loads(done.stdout.splitlines()[-1])
    for ours in INTERFACE[:2]:
        theirs = real[ours.__name__]
        assert sorted(ours.__abstractmethods__) == theirs["abstract"]
        for name, call in inspect.getmembers(ours, inspect.isfunction):
            if name in theirs:
                parameters = list(inspect.signature(call).parameters)
                assert parameters == theirs[name][: len(parameters)], f"{version}: {name}"
    assert {"request_id"} <= set(real["RequestData"])
    assert {"new_requests", "cached_requests"} <= set(real["SchedulerOutput"])
