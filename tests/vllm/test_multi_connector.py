"""FlexCache as a child of MultiConnector, beside vLLM's ExampleConnector, on real engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driven_engine import DidNotRun, DrivenEngine, running
from engines import FLEXCACHE, Engine, Settings, make_prompt
from paths import MODELS
from test_processes import run
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from flexcache.errors import ConfigError
from flexcache.integration.vllm.calls import NoMatch
from flexcache.integration.vllm.engine import is_served_by_sibling, read_transfer_config
from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [pytest.mark.whole, pytest.mark.runners]


PROMPT = make_prompt(700, 1)
SHARES_A_PREFIX = PROMPT[:300] + make_prompt(200, 2)
PROMPTS = {"again": PROMPT, "prefix": SHARES_A_PREFIX, "short": make_prompt(40, 3)}
CONFIG = {"num_cpu_blocks": 128, "skip_slow_loads": False}
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 32 << 20,
    "seed": 0,
}


def settings(**options: Any) -> Settings:
    return Settings(
        options.pop("system", "FlexCache"), "tiny", dram_gb=None, engine=ENGINE, num_threads=1,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The tokens of an engine without a connector."""
    from make_models import make_model

    make_model(MODELS, "tiny")
    log = tmp_path_factory.mktemp("alone") / "log"
    with running(DrivenEngine(settings(system="alone"), log)) as engine:
        return {name: engine.generate(prompt)[0] for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("order", ["FlexCache first", "ExampleConnector first"])
def test_tokens_and_hits_beside_another_connector(
    order: str,
    role: str,
    expected: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    example = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    is_first = order == "FlexCache first"
    connectors = [{}, example] if is_first else [example, {}]
    log = tmp_path / "log"
    both = settings(more=CONFIG, connectors=connectors, role=role)
    with running(DrivenEngine(both, log)) as engine:
        assert engine.generate(PROMPT) == (expected["again"], 0)
        engine.forget("GPU")
        # Both have it; vLLM takes the first one's.
        assert engine.generate(PROMPT) == (expected["again"], 672)
        engine.forget("GPU")
        # ExampleConnector knows whole prompts only.
        assert engine.generate(SHARES_A_PREFIX) == (expected["prefix"], 288)
        assert engine.generate(PROMPTS["short"]) == (expected["short"], 0)
        engine.settle()
        stats = engine.stats()
        loaded = engine.metric("vllm:flexcache_loaded_bytes") / stats["block_bytes"]
        assert loaded == 9 + (21 if is_first else 0)
        assert engine.metric("vllm:flexcache_dram_hit_tokens") == 672 + 288  # what was found
        assert stats["tiers"]["CPU"]["leased"] == 0
    assert ("Inject KV cache of 672 tokens" in log.read_text()) is not is_first
    assert "requests_may_fail" not in log.read_text()  # the parent's policy is recompute


@pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only")
@pytest.mark.parametrize(
    ("siblings", "keeps_groups"),
    [(["FlexCache", "Offloading"], True), (["Offloading", "FlexCache"], True),
     (["FlexCache", "Example"], False)],
)  # fmt: skip
def test_a_model_keeps_its_groups_if_every_sibling_can(
    siblings: list[str], keeps_groups: bool, tmp_path: Path
) -> None:
    spec = {"spec_name": "HostTieringSpec", "spec_module_path": "vllm_offload_cpu"}
    children: dict[str, dict[str, Any]] = {
        "FlexCache": {},
        "Offloading": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {**spec, "cpu_bytes_to_use": 100 << 20},
        },
        "Example": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
        },
    }
    both = Settings(
        "FlexCache", "gemma3", dram_gb=0.2, engine={**ENGINE, "dtype": "float32"}, num_threads=1,
        more={"skip_slow_loads": False}, connectors=[children[name] for name in siblings],
        has_groups=True,
    )  # fmt: skip
    prompt = make_prompt(1200, 1)
    with running(DrivenEngine(both, tmp_path / "log")) as engine:
        cold, cached = engine.generate(prompt)
        assert cached == 0
        engine.forget("GPU")
        tokens, cached = engine.generate(prompt)
        assert tokens == cold
        assert cached > 1000
        assert engine.stats()["hit_blocks"]["CPU"] > 0
        engine.settle()
        blocks = engine.gpu_blocks()
        assert (blocks["all"] == 127) is keeps_groups  # as many as without a connector
        assert blocks["free"] == blocks["all"]


def test_statistics_reach_another_process(tmp_path: Path) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    ours = {**FLEXCACHE, "kv_role": "kv_both", "kv_connector_extra_config": CONFIG}
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, example]},
    }
    seen = run({"model": "tiny", "prompts": [300], "engine": {"kv_transfer_config": transfer}})
    assert all(seen["tokens_equal"])
    assert seen["cached"] == [288]
    assert seen["dram_hit_tokens"] == 288


class Child(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector that only reads its config."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.obeyed = read_transfer_config(vllm_config)
        self.own = vllm_config.kv_transfer_config

    def get_num_new_matched_tokens(self, *_: Any) -> Any: ...
    def update_state_after_alloc(self, *_: Any) -> Any: ...
    def build_connector_meta(self, *_: Any) -> Any: ...
    def start_load_kv(self, *_: Any, **__: Any) -> Any: ...
    def wait_for_layer_load(self, *_: Any) -> Any: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> Any: ...
    def wait_for_save(self) -> Any: ...


def make_config(**transfer: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )


@pytest.mark.parametrize(("policy", "of_child"), [("recompute", "fail"), ("fail", "recompute")])
def test_the_policy_that_vllm_obeys_is_read(policy: str, of_child: str) -> None:
    child = {
        "kv_connector": "Child",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": of_child,
    }
    config = make_config(
        kv_connector="MultiConnector",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [child]},
    )
    parent = MultiConnector(config, KVConnectorRole.SCHEDULER, None)
    (only,) = parent.sub_connectors
    assert only.own.kv_load_failure_policy == of_child
    assert only.obeyed is config.kv_transfer_config


def test_a_second_flexcache_is_refused_by_name() -> None:
    ours = {**FLEXCACHE, "kv_role": "kv_both", "kv_connector_extra_config": CONFIG}
    inner = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours]},
    }  # fmt: skip
    for children in ([ours, ours], [inner, ours]):
        config = make_config(
            kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}
        )
        with pytest.raises(ConfigError, match="FlexCacheConnectorV1 is there 2 times"):
            MultiConnector(config, KVConnectorRole.SCHEDULER, None)


def test_an_engine_with_a_second_flexcache_says_why_it_does_not_start(tmp_path: Path) -> None:
    tiers = {**CONFIG, "num_ssd_blocks": 128, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    twice = settings(more=tiers, connectors=[{}, {}])
    with (
        pytest.raises(DidNotRun, match="FlexCacheConnectorV1 is there 2 times"),
        running(DrivenEngine(twice, tmp_path / "log")),
    ):
        pass


def test_a_connector_alone_reads_its_own_policy() -> None:
    config = make_config(kv_connector="Child")
    assert Child(config, KVConnectorRole.SCHEDULER, None).obeyed is config.kv_transfer_config


def test_no_look_up_holds_back_what_a_sibling_serves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, side = engine.connector, engine.connector._scheduler
    monkeypatch.setattr(side._cache, "match", lambda *_: NoMatch.UNDECIDED)

    def ask(params: Any) -> Any:
        request = SimpleNamespace(
            lora_request=None,
            request_id="a",
            num_tokens=64,
            block_hashes=[b"1", b"2"],
            kv_transfer_params=params,
        )
        answer = connector.get_num_new_matched_tokens(request, 0)
        side.gets._requests.clear()
        side._cache.names.ended(request)
        return answer

    assert ask({"do_remote_prefill": True}) == (None, False)  # alone: no other can serve it
    monkeypatch.setattr(side.gets, "_has_siblings", True)
    assert ask({"do_remote_prefill": True}) == (0, False)
    assert ask(None) == (None, False)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, False),
        ({}, False),
        ({"flexcache_priority": 1}, False),
        ({"do_remote_prefill": True}, True),
        ({"do_remote_prefill": False, "do_remote_decode": True}, False),
    ],
)
def test_requests_whose_kv_a_sibling_brings(params: Any, expected: bool) -> None:
    assert is_served_by_sibling(SimpleNamespace(kv_transfer_params=params)) is expected
