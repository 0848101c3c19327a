"""Hosts as network namespaces: each has an address of its own, and links that can be cut.

A host runs a cache with an engine (`python hosts.py`), which does what lines of JSON say.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

PORT = 9600
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """A switch, and hosts at it.

    Attributes:
        names: Of the hosts' namespaces.
        addresses: Of the hosts.
    """

    def __init__(self, count: int) -> None:
        tag = f"fc{os.getpid()}-{next(_numbers)}"
        self._switch = f"{tag}-s"
        self.names = [f"{tag}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0",
                "netns", name)  # fmt: skip
            _ip("-n", self._switch, "link", "set", f"v{i}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self, host: int) -> None:
        """Let nothing pass to a host or from it; its own interface stays up."""
        _ip("-n", self._switch, "link", "set", f"v{host}", "nomaster")

    def heal(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"v{host}", "master", "bridge")

    def close(self) -> None:
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Make a network; skip the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, with ip")
    with ExitStack() as stack:
        try:
            made = Network(count)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")
        stack.callback(made.close)
        yield made


class HostCache:
    """A cache with one engine on a host."""

    def __init__(self, namespace: str, log: Path, head_size: int = 64, **settings: Any) -> None:
        self._log = log.open("ab")
        self._directory = tempfile.mkdtemp(prefix="fc-host-")  # for sockets: with short paths
        environment = {
            **os.environ,
            **{f"FLEXCACHE_{name.upper()}": str(value) for name, value in settings.items()},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_RUNTIME_DIR": self._directory,
        }
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, __file__, str(head_size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        self._read()

    def begin(self, act: str, **arguments: Any) -> None:
        """Tell it to do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"act": act, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the host's process has ended: see {self._log.name}"
        return json.loads(line)

    def end(self) -> Any:
        """Wait for what it does, and return what came of it."""
        answer = self._read()
        assert "error" not in answer, answer
        return answer["result"]

    def do(self, act: str, **arguments: Any) -> Any:
        self.begin(act, **arguments)
        return self.end()

    def signal(self, which: int, worker: str | None = None) -> None:
        """Send a signal to its process, or to one of its workers."""
        pid = self._process.pid if worker is None else self.do("pids")[worker]
        os.kill(pid, which)

    def kill(self) -> None:
        """Kill it and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._log.close()
        shutil.rmtree(self._directory)


def addresses_of(hosts: Network) -> str:
    """The setting `peers` for these hosts."""
    return ",".join(f"tcp://{address}:{PORT}" for address in hosts.addresses)


@contextmanager
def host_caches(directory: Path, hosts: Network, **settings: Any) -> Iterator[list[HostCache]]:
    """Run a cache on each host; all know all by address, and have the same keys."""
    from flexcache.protocol.trust import make_keys

    keys = directory / "keys"
    if not keys.exists():
        make_keys(keys)
    with ExitStack() as stack:
        caches = []
        for number in range(len(hosts.names)):
            cache = start_host(directory, hosts, number, **settings)
            stack.callback(cache.close)
            caches.append(cache)
        for cache in caches:
            cache.wait_ready()
        yield caches


def start_host(directory: Path, hosts: Network, number: int, **settings: Any) -> HostCache:
    own = {
        "num_cpu_blocks": 192, "skip_slow_loads": "false", "peers": addresses_of(hosts),
        "peer_endpoint": f"tcp://{hosts.addresses[number]}:{PORT}",
        "curve_keys": directory / "keys", "server_timeout_s": 6.0, **settings,
    }  # fmt: skip
    if "num_ssd_blocks" in settings:
        own["ssd_cache_dirs"] = directory / f"ssd-{number}"
    return HostCache(hosts.names[number], directory / f"host-{number}.log", **own)


def until_all_are_up(caches: Sequence[HostCache]) -> None:
    """Wait until each knows the others."""
    deadline = time.monotonic() + 60
    for cache in caches:
        while cache.do("stats")["peers"]["up"] < len(caches) - 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# -- the host's process ---------------------------------------------------------------------------


def serve() -> None:
    """Carry out what standard input says, until it ends."""
    from load import LoadEngine, make_kv, make_model

    from flexcache import CacheConfig, KVManager, KVTPClient
    from flexcache.config.sources import read_layers

    _, variables = read_layers(os.environ, None)
    model = make_model(int(sys.argv[1]), dp_size=1)  # else both find one private server
    kv = make_kv(model)
    config = CacheConfig.from_layers(variables)
    manager = KVManager(model, config)
    with manager:
        client = KVTPClient(manager.endpoint, curve_keys=config.curve_keys)
        client.register_kv_caches(kv)
        manager.wait_ready(60)
        while not manager.stats()["worker_up"].get("peer"):
            time.sleep(0.02)
        engine = LoadEngine(manager, kv, seed=os.getpid(), client=client)
        print(json.dumps({"result": None}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": carry_out(engine, request)}
            except Exception as error:  # it is the test that fails
                answer = {"error": repr(error)}
            print(json.dumps(answer, default=str), flush=True)
        client.close()


def carry_out(engine: Any, request: dict[str, Any]) -> Any:
    from msgspec import to_builtins

    from flexcache.server.operator import Operator

    manager, act = engine.manager, request.pop("act")
    if act == "put":
        engine.put(request["prompt"], request["count"])
    elif act == "get":
        began_s = time.monotonic()
        while request.get("awaits") and not is_settled(engine, request["prompt"], request["count"]):
            time.sleep(0.005)  # as an engine does between its steps
        arrived = engine.get(request["prompt"], request["count"])
        seconds = time.monotonic() - began_s
        return {"arrived": arrived, "wrong": engine.seen.wrong, "seconds": seconds}
    elif act == "load":
        until_s = time.monotonic() + request["seconds"]
        while time.monotonic() < until_s and not engine.seen.wrong:
            engine.step()
        seen = engine.seen
        return {
            "steps": seen.steps, "hits": seen.hits, "lost": seen.lost, "wrong": seen.wrong,
            "longest_call_s": seen.longest_call_s,
        }  # fmt: skip
    elif act == "drain":
        Operator(manager._transport.server).drain(request["to"], request["seconds"])
    elif act == "drained":
        operator = Operator(manager._transport.server)
        return to_builtins(operator.drain_progress(request.get("stop", False)))
    elif act == "clear":
        return manager.clear(request.get("tier"))
    elif act == "stats":
        return manager.stats()
    elif act == "pids":
        return manager.stats()["workers"]
    elif act == "check":
        manager.check()
    else:
        raise ValueError(act)
    return None


def is_settled(engine: Any, prompt: int, count: int) -> bool:
    """Whether a get need not wait for what is on its way to a peer's DRAM."""
    from load import tokens_of

    found = engine.manager.get_match_by_tier(tokens_of(prompt, count), awaits_loads=True)
    if found is not None:
        engine.manager.cancel([found[0]])
    return found is not None


if __name__ == "__main__":
    serve()
