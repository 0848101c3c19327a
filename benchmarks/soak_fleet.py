"""Fleet of the soak: two vLLM engines and an SGLang engine, a cache server for each model and
engine, a store, and the router in front.

One of the vLLM engines has a model with sliding windows; the SGLang engine and the other one serve
the same model, so that the router chooses between them. A cache server serves one model and one
engine's layout, so there are three.

Or hosts, network namespaces, each with a vLLM engine of one model and a cache server. These are
peers. The first engine computes prompts for the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from api_server import SERVER
from engines import ENGINE_ENV, FLEXCACHE
from hosts import PORT, Network
from make_models import make_model
from paths import MODELS, ROOT, SUPPORT
from ports import free_port
from soak_parts import TOKEN, Part

from flexcache.protocol.trust import make_keys

BLOCK = 32
PAGE = 16
QUOTAS = "team-a=40%,team-b=20%,*=20%"
MAX_TOKENS = 2048
GPU_TOKENS = 4096
DTYPE = "float32"  # in 16 bits a hit may round to other tokens, with any cache


@dataclass(frozen=True)
class Serving:
    """An engine of the soak.

    Attributes:
        model: What it serves, and its name for the router.
        role: Of it, for the router.
        host: Its number; None: there are no hosts.
    """

    name: str
    model: str
    is_sglang: bool = False
    role: str = "both"
    host: int | None = None


ENGINES = (
    Serving("vllm", "tiny"),
    Serving("vllm-hybrid", "hybrid"),
    Serving("sglang", "tiny", is_sglang=True),
)


def on_hosts(count: int) -> list[Serving]:
    roles = ["prefill", *["decode"] * (count - 1)]
    return [Serving(f"host-{i}", "tiny", role=role, host=i) for i, role in enumerate(roles)]


def vllm_command(
    serving: Serving, port: int, more: Sequence[str] = (), address: str = "127.0.0.1"
) -> list[str]:
    return [
        sys.executable, "-m", SERVER, "--model", str(make_model(MODELS, serving.model)),
        "--served-model-name", serving.model, "--host", address, "--port", str(port),
        "--enforce-eager", "--dtype", DTYPE, "--max-model-len", str(MAX_TOKENS),
        "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(24 << 20),
        "--enable-prompt-tokens-details",
        *(() if serving.model == "hybrid" else ("--block-size", str(BLOCK))), *more,
    ]  # fmt: skip


def sglang_command(
    serving: Serving, python: Path, port: int, more: Sequence[str] = ()
) -> list[str]:
    return [
        str(python), "-m", "sglang.launch_server",
        "--model-path", str(make_model(MODELS, serving.model)),
        "--served-model-name", serving.model, "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--dtype", DTYPE, "--page-size", str(PAGE), "--max-total-tokens", str(GPU_TOKENS),
        "--max-running-requests", "8", "--context-length", str(MAX_TOKENS),
        "--disable-overlap-schedule", "--grammar-backend", "none", "--skip-server-warmup",
        "--enable-cache-report", "--watchdog-timeout", "600", "--log-level", "warning", *more,
    ]  # fmt: skip


def _vllm_options(cache: dict[str, object], publisher: dict[str, str]) -> list[str]:
    transfer = {
        **FLEXCACHE, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": cache,
    }  # fmt: skip
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **publisher}
    return ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)]


def _sglang_options(cache: dict[str, object], publisher: dict[str, str]) -> list[str]:
    linker = {
        "linker": "FlexCacheLinker", "linker_module_path": "flexcache.integration.sglang",
        "linker_extra_config": cache,
    }  # fmt: skip
    return [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend", "dynamic",
        "--unified-cache-external-linker-config", json.dumps(linker),
        "--kv-events-config", json.dumps({"publisher": "zmq", **publisher}),
    ]  # fmt: skip


class Fleet:
    """All parts, by name.

    Args:
        sglang_python: Of SGLang's environment; None leaves SGLang out.
        remote_url: Of the store.
        small_disk: Directory of a file system that is smaller than the SSD tier in it, for one
            of the servers; None gives it one that is not.
        network: Of the hosts; None: all run on this one.
    """

    def __init__(
        self, directory: Path, sglang_python: Path | None, remote_url: str,
        small_disk: Path | None, network: Network | None = None,
    ) -> None:  # fmt: skip
        self.network = network
        self.servings = [s for s in ENGINES if sglang_python or not s.is_sglang]
        if network is not None:
            self.servings = on_hosts(len(network.names))
            make_keys(directory / "keys")
        self.urls: dict[str, str] = {}
        """Addresses of engines, by name."""
        self.parts: dict[str, Part] = {}
        self.http: dict[str, str] = {}
        """Addresses of cache servers, by their engine's name, and of the router's control API."""
        self._directory = directory
        self._sglang_python = sglang_python
        self._remote_url = remote_url
        workers, shared_events = [], []
        for number, serving in enumerate(self.servings):
            ssd = directory / f"ssd-{serving.name}"
            if small_disk is not None and number == 0:
                ssd = small_disk / "ssd"
            shared_events.append(self._add_server(serving, ssd))
            workers.append(self._add_engine(serving))
        self.router_url = self._add_router(workers, shared_events)

    def reference(self, serving: Serving) -> Part:
        """Return an engine like this one, without a cache."""
        port = free_port()
        log = self._directory / f"{serving.name}-alone.log"
        return self._engine_part(f"{serving.name} alone", serving, port, log)

    def _add_server(self, serving: Serving, ssd: Path) -> str:
        """Returns the addresses of its events, as the router wants them."""
        events, replay, http = (f"{self._address(serving)}:{free_port()}" for _ in range(3))
        file = self._directory / f"{serving.name}.toml"
        settings = {
            "cpu_cache_gb": 0.06, "ssd_cache_gb": 0.16, "ssd_cache_dirs": [str(ssd)],
            "remote_url": f"{self._remote_url}", "http_endpoint": http, "kv_events": True,
            # An address that is not of this host's own network namespace would be connected to.
            "kv_events_endpoint": f"tcp://*:{events.rpartition(':')[2]}",
            "kv_events_replay_endpoint": f"tcp://{replay}",
            "skip_slow_loads": False, "op_timeout_s": 10.0, "quotas": QUOTAS, "log_format": "json",
            "trace_dir": str(self._directory / f"traces-{serving.name}"), "trace_file_mb": 8,
            **({"kv_events_hashes": "int_first"} if serving.is_sglang else {}),
            **self._peer_settings(serving),
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        file.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "flexcache.cli", "server", "--config", str(file),
                   "--endpoint", self._endpoint(serving)]  # fmt: skip
        name = f"cache of {serving.name}"
        self.http[serving.name] = f"http://{http}"
        self.parts[name] = Part(
            name, [*self._prefix(serving), *command], f"http://{http}/healthz",
            self._directory / f"{name}.log", {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return f"tcp://{events},tcp://{replay}"

    def _address(self, serving: Serving) -> str:
        if self.network is None or serving.host is None:
            return "127.0.0.1"
        return self.network.addresses[serving.host]

    def _prefix(self, serving: Serving) -> list[str]:
        """Return what runs a command on a host."""
        if self.network is None or serving.host is None:
            return []
        return ["ip", "netns", "exec", self.network.names[serving.host]]

    def _peer_settings(self, serving: Serving) -> dict[str, object]:
        if self.network is None:
            return {}
        peers = [f"tcp://{address}:{PORT}" for address in self.network.addresses]
        return {
            "peer_endpoint": f"tcp://{self._address(serving)}:{PORT}", "peers": peers,
            "curve_keys": str(self._directory / "keys"), "http_token": TOKEN,
        }  # fmt: skip

    def _endpoint(self, serving: Serving) -> str:
        return f"ipc://{self._directory}/{serving.name}.sock"

    def _add_engine(self, serving: Serving) -> str:
        """Returns the router's table of it."""
        port, events, replay = (free_port() for _ in range(3))
        extra = {"endpoint": self._endpoint(serving), "skip_slow_loads": False}
        if self.network is not None:
            extra["curve_keys"] = str(self._directory / "keys")
        publisher = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        options = (_sglang_options if serving.is_sglang else _vllm_options)(extra, publisher)
        log = self._directory / f"{serving.name}.log"
        self.parts[serving.name] = self._engine_part(serving.name, serving, port, log, options)
        address = self._address(serving)
        self.urls[serving.name] = url = f"http://{address}:{port}"
        pair = f"tcp://{address}:{events},tcp://{address}:{replay}"
        stage = f'role = "{serving.role}"\n'
        if serving.host is not None:
            stage += f"peer_port = {PORT}\n"
        return f'[[workers]]\nurl = "{url}"\nevents = ["{pair}"]\n{stage}'

    def _engine_part(
        self, name: str, serving: Serving, port: int, log: Path, options: Sequence[str] = ()
    ) -> Part:
        address = self._address(serving)
        health = f"http://{address}:{port}/health"
        paths = [str(SUPPORT), str(ROOT)]
        if not serving.is_sglang:
            environment = {**ENGINE_ENV, "PYTHONPATH": os.pathsep.join(paths)}
            command = [*self._prefix(serving), *vllm_command(serving, port, options, address)]
            return Part(name, command, health, log, environment)
        assert self._sglang_python is not None
        from sglang_engine import ENVIRONMENT, STAND_INS

        environment = {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0",
                       "PYTHONPATH": os.pathsep.join([str(STAND_INS), *paths])}  # fmt: skip
        command = sglang_command(serving, self._sglang_python, port, options)
        return Part(name, command, health, log, environment)

    def _add_router(self, workers: Sequence[str], shared_events: Sequence[str]) -> str:
        port, control = free_port(), free_port()
        file = self._directory / "router.toml"
        file.write_text(f"shared_events = {json.dumps(shared_events)}\n" + "\n".join(workers))
        command = [sys.executable, "-m", "flexcache.cli", "router", "--config", str(file),
                   "--port", str(port), "--control-port", str(control)]  # fmt: skip
        url, self.http["router"] = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control}"
        self.parts["router"] = Part(
            "router", command, f"{url}/health", self._directory / "router.log",
            {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return url
