"""The systems that are compared: one model and engine, with another cache below the GPU's blocks.

All have the same number of GPU blocks, and those that have a DRAM tier the same size of it. The
engine is vLLM on the CPU, so "GPU" stands for its own KV cache. vLLM's own offloading copies with a
worker of ours, since its own copies with CUDA streams.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api_server import call
from engines import ENGINE_ENV, FLEXCACHE, OFFLOADING, fast_dtype
from lmcache_server import die_with_parent, running_server
from paths import ROOT, SUPPORT, python_path
from ports import free_port
from venvs import peer_python

NONE, PEER, LMCACHE = "no cache", "vLLM's own offloading", "LMCache"
DRAM, SSD = "FlexCache DRAM", "FlexCache DRAM + SSD"
ARMS = (NONE, PEER, LMCACHE, DRAM, SSD)
BIG_GPU = "no cache, large GPU"
"""Gives the answers that a correct engine gives: it never reloads anything."""

READY_S = 300
BLOCK = 32
SERVED = "model"
SOURCES = {
    "GPU": ("vllm:prompt_tokens_by_source_total", 'source="local_cache_hit"'),
    "cache": ("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'),
    "computed": ("vllm:prompt_tokens_by_source_total", 'source="local_compute"'),
    "DRAM": ("vllm:flexcache_dram_hit_tokens_total", ""),
    "SSD": ("vllm:flexcache_ssd_hit_tokens_total", ""),
}
"""Counters of a server, by where the KV of prompt tokens came from; the last two are of "cache"."""


class DidNotRun(Exception):
    """A server does not start, or a tool fails; the message has the reason."""


@dataclass(frozen=True)
class Sizes:
    """Tokens that each tier holds, and the longest request."""

    gpu: int = 4_352
    dram: int = 16_384
    ssd: int = 262_144
    big_gpu: int = 32_768
    longest: int = 3_072

    def largest(self, arm: str) -> int:
        """Return the tokens of an arm's largest tier."""
        return {BIG_GPU: self.big_gpu, NONE: self.gpu, SSD: self.ssd}.get(arm, self.dram)


class Server:
    """A running server, its model and what it says of itself."""

    def __init__(self, url: str, model: Path, capacity: int) -> None:
        self.url = url
        self.model = model
        self.capacity = capacity
        """Tokens that the largest of its tiers holds."""

    def tokens_by_source(self) -> dict[str, float]:
        """Return tokens of prompts so far, by where their KV came from."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {
            source: sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if line.startswith(name) and label in line
            )
            for source, (name, label) in SOURCES.items()
        }


def kv_bytes_per_token(model: Path) -> int:
    """Return the KV of a token of all layers, as the server keeps it."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = 2 if fast_dtype() == "bfloat16" else 4
    return int(2 * config["num_hidden_layers"] * heads * size * width)


@contextmanager
def serving(
    arm: str, model: Path, sizes: Sizes, directory: Path, venvs: Path, log: Path
) -> Iterator[Server]:
    """Run an arm's server, and for LMCache its cache server too.

    Args:
        directory: Of the SSD tier; what is there from before is found again.
        log: File that their output is appended to.

    Raises:
        DidNotRun: Says why; `Unsupported` where an environment cannot be made.
    """
    bytes_per_token = kv_bytes_per_token(model)
    dram_bytes, python = sizes.dram * bytes_per_token, sys.executable
    with ExitStack() as stack:
        output = stack.enter_context(log.open("a+b"))
        transfer: dict[str, Any] | None = None
        extra: dict[str, Any]
        if arm == PEER:
            extra = {"spec_name": "HostTieringSpec", "spec_module_path": "vllm_offload_cpu",
                     "cpu_bytes_to_use": dram_bytes, "secondary_tiers": []}  # fmt: skip
            transfer = {**OFFLOADING, "kv_connector_extra_config": extra}
        elif arm == LMCACHE:
            python = peer_python(venvs, "lmcache-vllm")
            cache = running_server(output, dram_bytes / 1e9, (), peer_python(venvs, "lmcache"))
            host, _, cache_port = stack.enter_context(cache).rpartition(":")
            extra = {"lmcache.mp.host": host, "lmcache.mp.port": int(cache_port)}
            transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        elif arm in (DRAM, SSD):
            extra = {"cpu_cache_gb": dram_bytes / 1e9}
            if arm == SSD:
                directory.mkdir(parents=True, exist_ok=True)
                extra |= {"ssd_cache_gb": sizes.ssd * bytes_per_token / 1e9,
                          "ssd_cache_dirs": [str(directory)]}  # fmt: skip
            transfer = {**FLEXCACHE, "kv_load_failure_policy": "recompute",
                        "kv_connector_extra_config": extra}  # fmt: skip
        port = free_port()
        options = [
            "--model", str(model), "--served-model-name", SERVED, "--host", "127.0.0.1",
            "--port", str(port), "--enforce-eager", "--block-size", str(BLOCK),
            "--dtype", fast_dtype(),
            "--max-model-len", str(sizes.longest), "--max-num-seqs", "8", "--seed", "0",
            "--kv-cache-memory-bytes",
            str((sizes.big_gpu if arm == BIG_GPU else sizes.gpu) * bytes_per_token),
            "--enable-prompt-tokens-details",
            # Equal prompts get equal answers, whatever was asked before.
            "--override-generation-config", '{"temperature": 0}',
        ]  # fmt: skip
        if transfer is not None:
            options += ["--kv-transfer-config", json.dumps({**transfer, "kv_role": "kv_both"})]
        process = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_server.py")), *options],
            env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            server = Server(f"http://127.0.0.1:{port}", model, sizes.largest(arm))
            _wait_ready(server.url, process, log)
            yield server
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    skipped = "FLEXCACHE_SKIP_SLOW_LOADS"  # of tests; here every arm has its defaults
    engine = {name: value for name, value in ENGINE_ENV.items() if name != skipped}
    return {
        **os.environ, **engine,
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": python_path(ROOT, SUPPORT, ROOT / "benchmarks" / "peers"),
    }  # fmt: skip


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            raise DidNotRun((errors or lines or ["the server said nothing"])[-1][:400])
        time.sleep(0.5)
    for tokens in (64, 1024):  # lazy imports and memory are no arm's first request
        body = {"model": SERVED, "prompt": list(range(9, 9 + tokens)), "max_tokens": 4}
        call(f"{url}/v1/completions", body)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
