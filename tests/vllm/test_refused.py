"""A real vLLM engine whose cache refuses it runs without one: right tokens, no hit, one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paths import MODELS
from test_processes import run

from flexcache import CacheConfig, KVManager, ModelConfig
from flexcache.protocol.endpoints import private_endpoint

PROMPTS = [300, 65]


@pytest.fixture(scope="module")
def ssd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def accepted(ssd_dir: Path) -> Any:
    """Return what an accepted engine answers and leaves on SSD."""
    from make_models import make_model

    make_model(MODELS, "tiny")
    seen = run_tiny(ssd_dir=str(ssd_dir))
    assert seen["cached"] == [288, 64]
    assert seen["errors"] == []
    return seen


def run_tiny(**options: Any) -> Any:
    return run({"model": "tiny", "prompts": PROMPTS, **options}, in_process=True)


def assert_went_on_without(seen: Any, accepted: Any) -> None:
    assert seen["tokens"] == accepted["tokens"]
    assert all(seen["tokens_equal"])
    assert seen["cached"] == [0, 0]
    assert seen["probes"]["loaded"] == 0
    [error] = seen["errors"]
    assert "cache_refused" in error


def test_a_rank_whose_layout_is_not_that_on_ssd_leaves_the_engine_without_a_cache(
    accepted: Any, ssd_dir: Path
) -> None:
    seen = run_tiny(ssd_dir=str(ssd_dir), layout="transposed")
    assert_went_on_without(seen, accepted)
    assert "transposed" in seen["errors"][0]  # the engine's layout, beside the directory's
    assert seen["errors"][0].count("bfloat16[") == 2


def test_an_engine_of_another_model_than_the_servers_goes_on_without_a_cache(
    accepted: Any,
) -> None:
    endpoint = private_endpoint("refusing")
    other = ModelConfig("another", 2, 2, 64, torch.bfloat16)
    with KVManager(other, CacheConfig(tokens_per_block=32, num_cpu_blocks=8), endpoint=endpoint):
        seen = run_tiny(extra={"endpoint": endpoint, "num_ssd_blocks": None, "ssd_cache_dirs": []})
    assert_went_on_without(seen, accepted)
    assert "another|" in seen["errors"][0]
