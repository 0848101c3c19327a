"""A real Envoy, configured as in deploy/envoy/envoy.yaml, before engines of a test."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from paths import ROOT
from ports import free_ports

CONFIG = ROOT / "deploy" / "envoy" / "envoy.yaml"
_START_S = 60


def find_envoy() -> str | None:
    """Return the program, of the wheel or of the system; None if there is none."""
    return shutil.which("envoy", path=sysconfig.get_path("scripts")) or shutil.which("envoy")


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _endpoints(ports: Sequence[int]) -> list[dict[str, Any]]:
    return [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}]


class Envoy:
    """Envoy's process.

    Args:
        directory: For its config and log.
        engines: Ports of the engines.
        picker: Port of the endpoint picker.
        ext_proc: Changes of the picker's filter.
        filters: Further HTTP filters, before the picker's.
    """

    def __init__(
        self,
        directory: Path,
        engines: Sequence[int],
        picker: int,
        *,
        ext_proc: dict[str, Any] | None = None,
        filters: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.port, self._admin = free_ports(2)
        self._directory = directory
        config = copy.deepcopy(yaml.safe_load(CONFIG.read_text()))
        config["admin"] = {"address": _address(self._admin)}
        listener = config["static_resources"]["listeners"][0]
        listener["address"] = _address(self.port)
        chain = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
        chain[0]["typed_config"].update(ext_proc or {})
        chain[:0] = filters
        ports = {"engines": engines, "picker": [picker]}
        for cluster in config["static_resources"]["clusters"]:
            for check in cluster.get("health_checks", ()):
                check.update(interval="0.2s", no_traffic_interval="0.2s", timeout="30s")
            cluster["load_assignment"]["endpoints"] = _endpoints(ports[cluster["name"]])
        self._config = directory / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Envoy:
        program = find_envoy()
        assert program is not None
        with (self._directory / "envoy.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program, "-c", self._config, "--disable-hot-restart", "--concurrency", "1",
                    "--log-level", "warning",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        try:
            self.wait_until(lambda: self.admin("/ready").startswith("LIVE"))
            self.wait_until(lambda: self.healthy_pickers() == 1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def admin(self, path: str) -> str:
        """Return what the admin interface says; nothing while it does not listen."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}{path}") as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""

    def healthy_pickers(self) -> int:
        text = self.admin("/stats?filter=cluster.picker.membership_healthy")
        return int(text.rpartition(":")[2]) if text.strip() else 0

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            assert self._process is not None
            log = (self._directory / "envoy.log").read_text()
            assert self._process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.02)
