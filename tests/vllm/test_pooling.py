"""Models that embed: an engine whose KV cannot be used again, or that has none, runs without a
cache, on both sides; one that can is served like any other."""

from __future__ import annotations

import logging
import os
from typing import Any

import preloaded
import pytest
from engines import engine_arguments, make_prompt
from paths import MODELS
from test_processes import run as run_scenario

CONNECTOR = {
    "kv_connector": "FlexCacheConnectorV1",
    "kv_connector_module_path": "flexcache.integration.vllm",
}
TIMEOUT_S = 400.0
PROMPTS = [make_prompt(100, 1), make_prompt(300, 2)]


def embed(model: str, pooler: dict[str, Any], tasks: list[str], more: dict[str, Any]) -> Any:
    """Start an engine, and ask it for each of these tasks about all prompts."""
    from transformers import BertConfig, LlamaConfig
    from vllm import LLM
    from vllm.config import PoolerConfig

    lines: list[str] = []
    logging.getLogger("flexcache").addHandler(_Lines(lines))
    _make(model, BertConfig, LlamaConfig)
    arguments = engine_arguments(
        model, {"num_cpu_blocks": 64}, connector=CONNECTOR, runner="pooling", convert="embed",
        dtype="float32", max_model_len=512, pooler_config=PoolerConfig(**pooler), **more,
    )  # fmt: skip
    llm = LLM(**arguments)
    core = llm.llm_engine.engine_core.engine_core
    answers, cached = [], []
    for task in tasks:
        if task == "reset":
            while core.scheduler.has_requests():  # puts end in steps
                llm.llm_engine.step()
            assert llm.reset_prefix_cache()
            continue
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = llm.encode(requests, pooling_task=task, use_tqdm=False)
        answers.append([one.outputs.data.float().tolist() for one in found])
        cached.append([one.num_cached_tokens for one in found])
    core.shutdown()
    return answers, cached, lines


def _make(name: str, bert: Any, llama: Any) -> None:
    from make_models import make_model

    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 512, "vocab_size": 512,
        "initializer_range": 0.2,
    }  # fmt: skip
    configs = {
        "bert": bert(**sizes),
        "both-ways": llama(**sizes, num_key_value_heads=2),
    }
    make_model(MODELS, name, configs.get(name))


class _Lines(logging.Handler):
    """Appends what is said at WARNING and above to a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def run(model: str, pooler: dict[str, Any], tasks: list[str], **more: Any) -> Any:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return preloaded.call("vllm_imports", environment, TIMEOUT_S, embed, model, pooler, tasks, more)


def test_a_model_that_pools_over_all_tokens_is_served_and_nothing_is_loaded() -> None:
    answers, cached, lines = run("tiny", {"seq_pooling_type": "MEAN"}, ["embed"] * 3)
    assert answers[0] == answers[1] == answers[2]
    assert cached == [[0, 0]] * 3
    [line] = [line for line in lines if "runs without a cache" in line]
    assert "MEAN" in line


@pytest.mark.whole
def test_a_generative_model_is_cached_though_vllms_own_prefix_caching_is_off() -> None:
    options = {"model": "tiny", "prompts": [300], "engine": {"enable_prefix_caching": False}}
    seen = run_scenario(options, in_process=True)
    assert seen["cached"] == [288]
    assert all(seen["tokens_equal"])


@pytest.mark.whole
def test_a_model_that_pools_the_last_token_is_cached() -> None:
    answers, cached, _ = run("tiny", {"seq_pooling_type": "LAST"}, ["embed", "reset", "embed"])
    assert cached == [[0, 0], [96, 288]]
    assert [len(answer) for answer in answers[1]] == [256, 256]


@pytest.mark.whole
def test_a_task_that_needs_all_tokens_loads_none_of_them() -> None:
    tasks = ["token_embed", "reset", "token_embed"]
    answers, cached, _ = run("tiny", {"task": "token_embed"}, tasks)
    assert cached == [[0, 0], [0, 0]]
    assert [len(answer) for answer in answers[1]] == [len(prompt) for prompt in PROMPTS]
    assert answers[1] == answers[0]


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        ("bert", "BertModel"),
        pytest.param("both-ways", "LlamaBidirectionalModel", marks=pytest.mark.whole),
    ],
)
def test_a_model_without_kv_runs_without_a_cache(model: str, architecture: str) -> None:
    overrides = {"architectures": [architecture], "pooling": "avg"}
    answers, cached, lines = run(
        model, {}, ["embed"] * 2, hf_overrides=overrides, load_format="dummy"
    )
    assert answers[0] == answers[1]
    assert cached == [[0, 0]] * 2
    [line] = [line for line in lines if "runs without a cache" in line]
    assert model in line
