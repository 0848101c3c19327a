"""Two vLLM engines with FlexCache behind a router: each conversation returns to its KV.

    pip install ".[vllm,router]"
    python examples/router_two_engines.py --model Qwen/Qwen3-0.6B

Prints which engine took each turn, and how many tokens of its prompt the router expected there and
the engine found. `--devices 0 1` gives each engine a GPU of its own. The router listens on port
8090, its control API and the engines on the seven after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

CACHE = {
    "kv_connector": "FlexCacheConnectorV1",
    "kv_connector_module_path": "flexcache.integration.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_cache_gb": 1},
}
START_S = 600
NUM_TURNS = 3
SESSIONS = {
    "planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune. " * 12,
    "metals": "Iron, copper, tin, lead, zinc, nickel, silver, gold, mercury. " * 12,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Two engines behind a router.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--devices", nargs=2, help="CUDA_VISIBLE_DEVICES of each engine")
    parser.add_argument("--engine-args", default="", help="further arguments of `vllm serve`")
    parser.add_argument("--port", type=int, default=8090, help="the first of eight (8090)")
    options = parser.parse_args()
    with ExitStack() as stack:
        port = options.port
        router = ["flexcache.cli", "router", "--port", str(port), "--control-port", str(port + 1)]
        engines = {}
        for number in range(2):
            engine, events, replay = range(port + 2 + 3 * number, port + 5 + 3 * number)
            publisher = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            command = [
                "vllm.entrypoints.openai.api_server", "--model", options.model,
                "--host", "127.0.0.1", "--port", str(engine), "--enable-prompt-tokens-details",
                "--kv-transfer-config", json.dumps(CACHE),
                "--kv-events-config", json.dumps(publisher), *shlex.split(options.engine_args),
            ]  # fmt: skip
            device = {"CUDA_VISIBLE_DEVICES": options.devices[number]} if options.devices else {}
            url = f"http://127.0.0.1:{engine}"
            engines[url] = stack.enter_context(running(command, device))
            tcp = "tcp://127.0.0.1"
            router += ["--worker", url, "--events", f"{url}={tcp}:{events},{tcp}:{replay}"]
        for url, process in engines.items():
            wait_ready(url, process)
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, stack.enter_context(running(router, {})))
        talk(url, options.model, list(engines))


def talk(url: str, model: str, engines: list[str]) -> None:
    """Hold two conversations, turn by turn."""
    prompts = SESSIONS.copy()
    for turn in range(1, NUM_TURNS + 1):
        for session in prompts:
            body = {"model": model, "prompt": prompts[session], "max_tokens": 32}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                headers, content = answer.headers, json.load(answer)
            usage = content["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            number = engines.index(headers["x-flexcache-worker"]) + 1
            print(
                f"{session} turn {turn}: engine {number}, of {usage['prompt_tokens']} tokens "
                f"{headers.get('x-flexcache-matched-tokens', 'unknown')} expected, {cached} found"
            )
            prompts[session] += content["choices"][0]["text"] + " And which others? "
            time.sleep(0.5)  # the engine publishes its blocks with its next steps


@contextmanager
def running(module: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module as a process until the block ends."""
    process = subprocess.Popen([sys.executable, "-m", *module], env={**os.environ, **environ})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    give_up = time.monotonic() + START_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        if process.poll() is not None:
            sys.exit(f"the server of {url} ended with {process.returncode}")
        if time.monotonic() > give_up:
            sys.exit(f"{url} does not answer")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
