"""A server that comes up after the engine that started it no longer needs one."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from flexcache.config import CacheConfig, ServerConfig
from flexcache.protocol.endpoints import is_served, private_endpoint


def test_a_server_ends_soon_if_its_starter_has_left_before_any_client_came() -> None:
    endpoint = private_endpoint("unneeded")
    config = ServerConfig.for_engines(CacheConfig(num_cpu_blocks=4), endpoint)
    engine_fd, server_fd = os.pipe()
    command = "from flexcache.server.process import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, str(server_fd)],
        stdin=subprocess.PIPE, pass_fds=[server_fd],
    ) as server:  # fmt: skip
        os.close(server_fd)
        os.close(engine_fd)
        server.communicate(msgspec.json.encode(config.to_dict()), timeout=50)
        assert server.returncode == 0
    assert not is_served(endpoint)
