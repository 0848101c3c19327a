"""A router's decision begins to load a real vLLM's blocks from SSD, by their published names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from api_server import ApiServer, call, serving
from engines import FLEXCACHE, make_prompt
from make_models import make_model
from paths import MODELS
from ports import free_port
from router_process import RouterProcess, until

pytestmark = pytest.mark.whole


NUM_BLOCKS = 20
PROMPT = make_prompt(NUM_BLOCKS * 32 + 1, 31)
SALT = "alice"


def num_cached(router: RouterProcess, salt: str) -> int:
    """Send the prompt; return how much of it the engine found in a cache."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    details = call(f"{router.url}/v1/completions", body)["usage"]["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens") or 0)


def test_blocks_of_a_salted_prompt_are_read_once_and_early(tmp_path: Path) -> None:
    make_model(MODELS, "tiny")
    cache = f"http://127.0.0.1:{free_port()}"
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("kv", "again"))
    extra = {
        "cpu_cache_gb": 0.05, "ssd_cache_gb": 0.1, "ssd_cache_dirs": [str(tmp_path / "ssd")],
        "http_endpoint": cache.removeprefix("http://"),
        "kv_events_endpoint": events, "kv_events_replay_endpoint": replay,
    }  # fmt: skip
    server = ApiServer(
        tmp_path / "server.log", {"VLLM_SERVER_DEV_MODE": "1"},
        transfer={**FLEXCACHE, "kv_connector_extra_config": extra},
    )  # fmt: skip
    url = server.url
    with (
        serving(server),
        RouterProcess(
            (), f"--worker={url}", f"--events={url}={events},{replay}", f"--cache={url}={cache}"
        ) as router,
    ):

        def held(tier: str) -> int:
            sources = router.stats()["index"]["held_blocks"].values()
            return sum(source.get(tier, 0) for source in sources)

        assert num_cached(router, SALT) == 0
        until(lambda: held("disk") == NUM_BLOCKS)
        call(f"{cache}/cache/clear", {"tier": "CPU"})
        call(f"{url}/reset_prefix_cache", {})
        until(lambda: held("dram") == 0)

        assert num_cached(router, "bob") == 0
        assert router.stats()["caches"][cache]["results"] == {}
        call(f"{cache}/cache/clear", {"tier": "CPU"})

        # A decision whose request is still on its way.
        router.post("/select_and_reserve", {"token_ids": PROMPT, "cache_salt": SALT})
        until(lambda: router.stats()["caches"][cache]["results"] == {"accepted": 1})
        assert router.stats()["caches"][cache]["tokens"] == NUM_BLOCKS * 32
        until(lambda: call(f"{cache}/status")["ended_tasks"].get("prefetch_success") == 1)
        assert num_cached(router, SALT) == NUM_BLOCKS * 32
        status = call(f"{cache}/status")
        assert status["ops"]["DISK2H"]["blocks"] == NUM_BLOCKS
        assert status["early_loads"]["early"] == NUM_BLOCKS
