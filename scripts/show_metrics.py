"""Let Prometheus scrape a live FlexCache, and run every query of the dashboard and the alerts.

    python scripts/show_metrics.py                          a load of its own, for a minute
    python scripts/show_metrics.py --attach HOST:PORT       of a server that is at work already

Ends with 1 if a query of docs/grafana/flexcache.json returns no data, or one of alerts.yml cannot
be evaluated; draws the dashboard's panels into docs/grafana/dashboard.png. The load is one engine
over DRAM, SSD and a remote store; on its way the disk worker is killed and the store held up, so
that there is something to see. Needs `prometheus` (Debian's package, say) and matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from render_dashboard import Prometheus, Span, draw, queries_without_data

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from ports import free_port

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

GRAFANA = Path(__file__).resolve().parents[1] / "docs" / "grafana"
SCRAPE_S = 1.0
BLOCK, NUM_GPU_BLOCKS = 16, 64
NUM_PROMPTS, PROMPT_BLOCKS = 60, 32
MODEL = ModelConfig("show-metrics", 4, 8, 128, torch.bfloat16)
READY_S = 60.0
DATA_PATIENCE_S = 40.0


# -- a load ---------------------------------------------------------------------------------------


class Load:
    """One engine that looks up prompts, of which some come often, and stores what was missing."""

    def __init__(self, directory: Path, http_port: int, events_port: int) -> None:
        self.events = f"tcp://127.0.0.1:{events_port}"
        config = CacheConfig(
            num_cpu_blocks=512,
            num_ssd_blocks=1024,
            ssd_cache_dirs=[str(directory / "ssd")],
            remote_url=f"file://{directory / 'store'}",
            remote_timeout_s=1.0,
            transfer_chunk_mb=1.0,
            kv_events_endpoint=self.events,
            trace_dir=str(directory / "trace"),
            http_endpoint=str(http_port),
        )
        self.manager = KVManager(MODEL, config)
        shape = (NUM_GPU_BLOCKS, 2, BLOCK, MODEL.num_kv_heads, MODEL.head_size)
        self._kv = {f"layer.{i}": torch.randn(shape).bfloat16() for i in range(MODEL.num_layers)}
        self._slots = np.arange(PROMPT_BLOCKS * BLOCK)
        self._rng = np.random.default_rng(0)
        self._stop = threading.Event()
        self._client: KVTPClient | None = None
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def __enter__(self) -> Load:
        self.manager.start()
        self._client = KVTPClient(self.manager.endpoint)
        self._client.register_kv_caches(self._kv)
        self.manager.wait_ready(READY_S)
        self.manager.report_prefill(20_000)
        self._running = self._thread.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._client is not None
        assert self._running is not None
        self._stop.set()
        self._thread.shutdown()
        self._client.close()
        self.manager.shutdown()
        self._running.result()  # raises what ended it early

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            prompt = min(int(self._rng.zipf(1.3)) - 1, NUM_PROMPTS - 1)
            tokens = np.arange(PROMPT_BLOCKS * BLOCK) + 1_000_000 * prompt
            get, mask = self.manager.get_match(tokens)
            if mask.any():
                self.manager.launch([get], [self._slots[mask]])
                self.manager.wait([get], READY_S)
            put, _ = self.manager.put_async(tokens, self._slots)
            self.manager.wait([put], READY_S)

    def kill_disk_worker(self) -> None:
        os.kill(self.manager.stats()["workers"]["disk"], signal.SIGKILL)

    def hold_store_up(self, seconds: float) -> None:
        """Nothing of it answers what is asked about new prompts; a worker that replaces one is
        stopped too."""
        stopped, prompt = 0, 1_000_000_000
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid = self.manager.stats()["workers"].get("remote", stopped)
            if pid != stopped:
                os.kill(pid, signal.SIGSTOP)
                stopped = pid
            prompt += 1_000_000
            self.manager.get_match_by_tier(np.arange(BLOCK) + prompt)
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # it is just being replaced
            os.kill(stopped, signal.SIGCONT)

    def talk_nonsense(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(self.manager.endpoint)
            stranger.send(b"nonsense")
            stranger.recv()

    def go_through_trouble(self, seconds: float) -> None:
        """For so long, with what goes wrong spread over it."""
        time.sleep(0.3 * seconds)
        self.kill_disk_worker()
        time.sleep(0.15 * seconds)
        self.talk_nonsense()
        self.manager.clear("CPU")
        self.hold_store_up(0.25 * seconds)
        time.sleep(0.3 * seconds)


# -- Prometheus -----------------------------------------------------------------------------------


@contextmanager
def prometheus_scraping(
    target: str, token: str | None, directory: Path, job_name: str = "flexcache"
) -> Iterator[str]:
    """A Prometheus of our own on a free port; its address."""
    job: dict[str, Any] = {"job_name": job_name, "static_configs": [{"targets": [target]}]}
    if token is not None:
        job["authorization"] = {"credentials": token}
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": "1s"},
        "rule_files": [str(GRAFANA / "alerts.yml")],
        "scrape_configs": [job],
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(f"http://{address}/-/ready", process)
            yield f"http://{address}"
        finally:
            process.terminate()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError("prometheus does not start")


def check_alerts(prometheus: Prometheus) -> list[str]:
    """Evaluate every rule; returns what is wrong with those that cannot be, prints who fires."""
    wrong = []
    for group in prometheus.ask("rules", type="alert")["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                wrong.append(f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            prometheus.now(rule["query"])
            print(f"  {rule['name']:28}{rule['state']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--attach", metavar="HOST:PORT", help="HTTP endpoint of a running server")
    parser.add_argument("--token", help="that its HTTP wants")
    parser.add_argument("--out", type=Path, default=GRAFANA / "dashboard.png")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed: apt-get install prometheus")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fc-metrics-")))
        target = arguments.attach or f"127.0.0.1:{free_port()}"
        load = None
        if arguments.attach is None:
            load = stack.enter_context(Load(directory, int(target.rpartition(":")[2]), free_port()))
        address = stack.enter_context(prometheus_scraping(target, arguments.token, directory))
        started = time.time()
        print(f"{target} is scraped by {address} for {arguments.seconds:g} s")
        if load is None:
            time.sleep(arguments.seconds)
        else:
            load.go_through_trouble(arguments.seconds)
        prometheus = Prometheus(address)
        patience_ends = time.monotonic() + DATA_PATIENCE_S
        while time.monotonic() < patience_ends and queries_without_data(
            prometheus, Span(started, time.time(), SCRAPE_S)
        ):
            time.sleep(SCRAPE_S)  # a slow machine needs longer for the same load
        wrong = check_alerts(prometheus)
        empty = draw(prometheus, Span(started, time.time(), SCRAPE_S), arguments.out)
    for problem in wrong + [f"no data: {query}" for query in empty]:
        print(problem)
    print(f"{arguments.out} drawn; {len(empty)} queries without data, {len(wrong)} alerts amiss")
    return int(bool(wrong or empty))


if __name__ == "__main__":
    sys.exit(main())
