"""Proxies to be measured, each as processes before engines without a model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_openai_engine import FakeEngine
from ports import free_ports
from proxy_process import ProxyProcess
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from venvs import peer_python

from flexcache.bench.suite import Unsupported

PEERS = Path(__file__).resolve().parents[1] / "peers"
START_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")
_VOCABULARY = 200_000


@dataclass(frozen=True)
class System:
    """A running proxy.

    Attributes:
        port: Where it listens on loopback.
        pids: Its processes, children included; none: requests go to an engine.
        leaks: Returns how many requests it still counts as running; None: it does not tell.
    """

    port: int
    pids: list[int] = field(default_factory=list)
    leaks: Callable[[], int] | None = None

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have taken."""
        return sum(map(_cpu_s, self.pids))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


@contextmanager
def direct(engines: list[FakeEngine]) -> Iterator[System]:
    yield System(engines[0].port)


@contextmanager
def ours(engines: list[FakeEngine]) -> Iterator[System]:
    with ProxyProcess([engine.url for engine in engines]) as proxy:
        yield System(proxy.port, [proxy.process.pid], lambda: proxy.stats()["num_open"])


@contextmanager
def vllm_router(engines: list[FakeEngine], venvs: Path) -> Iterator[System]:
    python = peer_python(venvs, "vllm-router")
    port, metrics = free_ports(2)
    arguments = [
        str(Path(python).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(port),
        "--policy", "round_robin", "--log-level", "error",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--worker-urls", *(engine.url for engine in engines),
    ]  # fmt: skip
    with _process(arguments) as process:
        _wait_until_served(port, process)
        yield System(port, _family(process.pid))


@contextmanager
def dynamo(interval_s: float, venvs: Path, directory: Path) -> Iterator[System]:
    """Dynamo's frontend with its KV router, before two workers of its own kind."""
    python = peer_python(venvs, "dyn")
    model, discovery = directory / "model", directory / "discovery"
    discovery.mkdir()
    _write_model(model)
    port, system_port = free_ports(2)
    env = {
        **os.environ, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "HF_HUB_OFFLINE": "1",
        "DYN_LOG": "error", "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SYSTEM_PORT": str(system_port),
    }  # fmt: skip
    env.pop("PYTHONPATH", None)
    worker = [python, str(PEERS / "dynamo_echo.py"), str(model), str(interval_s)]
    frontend = [
        python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
        "--router-mode", "kv", "--no-router-kv-events",
    ]  # fmt: skip
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(_process(worker, {**env, "DYN_SYSTEM_PORT": "-1"}))
        process = stack.enter_context(_process(frontend, env))
        _wait_until_served(port, process)
        yield System(port, _family(process.pid))


def _write_model(directory: Path) -> None:
    """Write what Dynamo needs of a model: a tokenizer, a chat template, and sizes."""
    directory.mkdir()
    words = {f"w{number}": number for number in range(1000)}
    tokenizer = Tokenizer(WordLevel({**words, "<unk>": 1000}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({**described, "eos_token": "w0"}))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": _VOCABULARY, "max_position_embeddings": 1 << 20, "eos_token_id": 0,
        "bos_token_id": 1, "intermediate_size": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


@contextmanager
def _process(
    arguments: list[str], env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        arguments, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _wait_until_served(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a completion is answered."""
    body: Any = json.dumps({"model": "fake", "prompt": [20, 21], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Unsupported(f"{process.args!r} ended with {process.returncode}")
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise Unsupported(f"no answer within {START_S:.0f} s")
