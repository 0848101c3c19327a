"""The TensorRT-LLM connector, driven by a scripted executor that compares every loaded block."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm
from cluster import READY_S, kill, until
from make_models import make_adapter
from paths import MODELS
from trtllm import BLOCK, NUM_BLOCKS, Executor, Request

from flexcache.errors import ConfigError, LoadLostError, UnsupportedLayoutError
from flexcache.protocol.endpoints import private_endpoint
from flexcache.transfer.gates import LayerLoad

trtllm.install()

from flexcache.integration import file_digests as files  # noqa: E402
from flexcache.integration import tensorrt_llm  # noqa: E402
from flexcache.integration.file_digests import ANY_TIME, FileDigests  # noqa: E402
from flexcache.integration.tensorrt_llm import worker as workers  # noqa: E402
from flexcache.integration.tensorrt_llm.engine import (  # noqa: E402
    check_supported,
    read_model_config,
    read_model_id,
)
from flexcache.integration.tensorrt_llm.scheduler import Scopes  # noqa: E402
from flexcache.integration.tensorrt_llm.worker import split_pool, split_regions  # noqa: E402

MODEL = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPT = list(range(100, 121))
"""Five blocks and a token."""

MakeExecutor = Callable[..., Executor]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


def arguments(model_dir: Path, **settings: Any) -> SimpleNamespace:
    kv = {"tokens_per_block": BLOCK, "dtype": "auto", "host_cache_size": None}
    kv |= settings.pop("kv", {})
    defaults = {"model": str(model_dir), "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
                "max_beam_width": 1, "dtype": "auto", "attn_backend": "TRTLLM"}  # fmt: skip
    return SimpleNamespace(**{**defaults, **settings}, kv_cache_config=SimpleNamespace(**kv))


@pytest.fixture
def make_executor(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeExecutor]:
    """Makes executors whose ranks have registered; at the end none may hold anything."""
    executors: list[Executor] = []
    # The model is written by this process, and the engine's usually begins after that.
    monkeypatch.setattr(files, "_began_ns", time.time_ns)

    def make(
        layerwise: str = "off", tp_size: int = 1, is_v2: bool = False, **config: Any
    ) -> Executor:
        config = {"num_cpu_blocks": 64, "layerwise_load": layerwise, **config}
        for name, value in config.items():
            monkeypatch.setenv(f"FLEXCACHE_{name.upper()}", str(value))
        llm_args = arguments(model_dir, tensor_parallel_size=tp_size)
        if tp_size > 1:  # other ranks are in other processes
            monkeypatch.setattr(workers, "find_cache", lambda _: None)
        executor = Executor(tensorrt_llm, llm_args, is_v2)
        executors.append(executor)
        if tp_size > 1:
            executor.step()  # the ranks learn where the cache is
        executor.scheduler.manager.wait_ready(READY_S)
        return executor

    yield make
    try:
        for executor in executors:
            executor.scheduler.check_idle()
            assert len(executor.free) == NUM_BLOCKS
    finally:
        for executor in executors:
            executor.close()


@pytest.fixture(params=[
    pytest.param(("off", 1, False), id="parked", marks=pytest.mark.whole),
    pytest.param(("on", 1, False), id="by layer"),
    pytest.param(("auto", 1, True), id="regions", marks=pytest.mark.whole),
    pytest.param(("off", 2, True), id="ranks, parked"),
    pytest.param(("on", 2, False), id="ranks, in the step", marks=pytest.mark.whole),
])  # fmt: skip
def executor(request: pytest.FixtureRequest, make_executor: MakeExecutor) -> Executor:
    layerwise, tp_size, is_v2 = request.param
    return make_executor(layerwise, tp_size, is_v2)


def test_a_prompt_is_computed_once_and_loaded_from_then_on(executor: Executor) -> None:
    first, again = Request(1, [*PROMPT]), Request(2, [*PROMPT])
    executor.run(first)
    assert first.num_matched == 0
    executor.run(again)
    assert again.num_matched == 20
    assert again.tokens == first.tokens
    longer = Request(3, [*first.tokens, 7, 8, 9, 10])  # a conversation goes on
    executor.run(longer)
    assert longer.num_matched == 20  # the block with the answer's last token was not whole
    hits = executor.scheduler.manager.stats()["engine"]["hit_blocks"]
    assert hits == {"CPU": 10}


def test_one_token_is_left_to_be_computed(executor: Executor) -> None:
    executor.run(Request(1, PROMPT[:20]))
    whole = Request(2, PROMPT[:20])
    executor.run(whole)
    assert whole.num_matched == 16


def test_only_what_the_engine_lacks_is_loaded(executor: Executor) -> None:
    executor.run(Request(1, [*PROMPT]))
    behind, within = (Request(n, [*PROMPT], local_tokens=n) for n in (8, 10))
    executor.run(behind)
    assert behind.num_matched == 12
    executor.run(within)  # a block that is there in part is not overwritten
    assert within.num_matched == 0


def test_the_first_request_of_an_engine_finds_what_others_have_stored(
    make_executor: MakeExecutor,
) -> None:
    endpoint = private_endpoint(f"trtllm-{os.getpid()}")
    make_executor(endpoint=endpoint).run(Request(1, [*PROMPT]))
    second = Request(2, [*PROMPT])
    make_executor(endpoint=endpoint).run(second)
    assert second.num_matched == 20


def test_salt_lora_and_media_keep_prompts_apart(executor: Executor) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_task_id": 1}, {"lora_task_id": 2},
        {"multimodal_hashes": [[1, 2]], "multimodal_positions": [3]},
        {"multimodal_hashes": [[1, 3]], "multimodal_positions": [3]},
    ]  # fmt: skip
    for number, kind in enumerate(kinds):
        request = Request(number, [*PROMPT], **kind)
        executor.run(request)
        assert request.num_matched == 0
    for number, kind in enumerate(kinds, 100):
        request = Request(number, [*PROMPT], **kind)
        executor.run(request)  # the executor compares what it gets
        assert request.num_matched == 20


def test_an_adapter_is_known_by_its_content(make_executor: MakeExecutor, tmp_path: Path) -> None:
    def run(executor: Executor, number: int, path: Path) -> int:
        request = Request(number, [*PROMPT], lora_task_id=7, py_lora_path=str(path))
        executor.run(request)
        return request.num_matched

    tuned, copied = tmp_path / "tuned", tmp_path / "copied"
    shutil.copytree(make_adapter(MODELS, 1), tuned)
    shutil.copytree(tuned, copied)
    config = {"endpoint": private_endpoint(f"trtllm-lora-{os.getpid()}")}
    executor = make_executor(**config)
    assert [run(executor, number, tuned) for number in (1, 2)] == [0, 20]
    (tuned / "adapter_model.safetensors").write_bytes(b"retrained")
    assert run(make_executor(**config), 3, tuned) == 0
    assert run(executor, 4, tuned) == 0  # no one says whether TensorRT-LLM has loaded it again
    names = [
        Scopes().read(Request(6, [], lora_task_id=number, py_lora_path=str(path)))
        for number, path in ((7, copied), (9, copied), (9, make_adapter(MODELS, 1)), (9, tuned))
    ]
    assert names[0] == names[1] == names[2] != names[3]


def test_the_engines_thread_does_not_wait_for_another_process_that_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(MODELS, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "flexcache").mkdir()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the engine's thread waits"))
    with (tmp_path / "flexcache" / "digests").open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert Scopes().read(Request(1, [], lora_task_id=7, py_lora_path=str(adapter)))


def test_weights_are_named_by_hand(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    manager = executor.scheduler.manager

    def run(number: int, local_tokens: int = 0) -> int:
        request = Request(number, [*PROMPT], local_tokens=local_tokens)
        executor.run(request)
        return request.num_matched

    assert [run(1), run(2)] == [0, 20]
    running = executor.add(Request(3, [7, *PROMPT]))
    executor.step()
    manager.new_weights("second")
    executor.step_until(lambda: running.is_over)
    again = Request(4, [7, *PROMPT])
    executor.run(again)
    assert again.num_matched == 0
    assert [run(5), run(6)] == [0, 20]


@pytest.mark.parametrize("unnamed", [
    {"multimodal_positions": [3]}, {"prompt_embedding_table": torch.ones(2)},
])  # fmt: skip
def test_inputs_that_nothing_identifies_are_not_cached(
    make_executor: MakeExecutor, unnamed: dict[str, Any]
) -> None:
    executor = make_executor()
    for number in (1, 2):
        request = Request(number, [*PROMPT], **unnamed)
        executor.run(request)
        assert request.num_matched == 0
    assert executor.scheduler.manager.stats()["tiers"]["CPU"]["indexed"] == 0


def test_several_requests_at_once(executor: Executor) -> None:
    prompts = [[*range(base, base + 9 + base % 5)] for base in range(0, 400, 100)]
    executor.run(*[Request(number, [*prompt]) for number, prompt in enumerate(prompts)])
    again = [Request(number + 10, [*prompt], num_new=5) for number, prompt in enumerate(prompts)]
    executor.run(*again)
    assert [request.num_matched for request in again] == [8, 8, 8, 8]


def test_requests_are_aborted_at_any_time(executor: Executor) -> None:
    executor.run(Request(1, [*PROMPT]))
    for number in range(2, 14):
        request = executor.add(Request(number, [*PROMPT], num_new=6))
        for _ in range(number // 2 - 1):
            executor.step()
        executor.abort(request)
        executor.step_until(lambda request=request: request.is_over)  # type: ignore[misc]
    last = Request(20, [*PROMPT])
    executor.run(last)
    assert last.num_matched == 20


def test_a_request_that_was_aborted_in_its_prompt_stores_nothing(
    make_executor: MakeExecutor,
) -> None:
    executor = make_executor()
    request = executor.add(Request(1, [*PROMPT]))
    executor.admit(request)
    executor.abort(request)
    executor.step_until(lambda: request.is_over)
    assert executor.scheduler.manager.stats()["tiers"]["CPU"]["indexed"] == 0


def test_the_blocks_of_an_aborted_load_stay_until_it_has_ended(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor()
    executor.run(Request(1, [*PROMPT]))
    with monkeypatch.context() as patched:  # the copy is with the rank, and does not begin
        patched.setattr(executor.ranks[0].worker.client, "open_gates", lambda _: None)
        request = executor.add(Request(2, [*PROMPT]))
        executor.step()
    assert request.state == "parked"
    executor.abort(request)
    assert request.state == "saving"
    executor.step_until(lambda: request.is_over)


def test_what_is_on_ssd_is_brought_to_dram_for_later_requests(
    make_executor: MakeExecutor, tmp_path: Path
) -> None:
    executor = make_executor(num_ssd_blocks=64, ssd_cache_dirs=str(tmp_path / "ssd"))
    manager = executor.scheduler.manager
    executor.run(Request(1, [*PROMPT]))
    until(lambda: manager.stats()["tiers"]["SSD"]["indexed"] == 5)
    manager.clear("CPU")
    assert executor.scheduler.get_num_new_matched_tokens(Request(2, [*PROMPT]), 0) == (0, False)
    until(lambda: manager.stats()["tiers"]["CPU"]["indexed"] == 5)
    third = Request(3, [*PROMPT])
    executor.run(third)
    assert third.num_matched == 20


@pytest.mark.whole
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layerwise", ["off", "on"])
def test_a_load_that_has_begun_ends_though_the_server_is_killed(
    make_executor: MakeExecutor, layerwise: str, tp_size: int
) -> None:
    executor = make_executor(layerwise, tp_size, endpoint=private_endpoint(f"trtllm-{os.getpid()}"))
    manager, first, second = executor.scheduler.manager, *(Request(n, [*PROMPT]) for n in (1, 2))
    executor.run(first)
    executor.add(second)
    executor.admit(second)
    task_id = executor.scheduler._gets[2].task_id
    for rank in executor.ranks:
        assert rank.worker.client.wait_held(task_id, 5, READY_S)
    kill(manager.stats()["server_pid"])
    executor.step_until(lambda: second.is_over)
    assert (second.state, second.num_matched) == ("done", 20)
    assert second.tokens == first.tokens
    until(lambda: not manager.is_ready())
    manager.wait_ready(READY_S)
    for number, num_matched in ((3, 0), (4, 20)):  # the next server's pool was empty
        request = Request(number, [*PROMPT])
        executor.run(request)
        assert request.num_matched == num_matched


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layerwise", ["off", "on"])
def test_a_lost_load_fails_its_step_and_makes_no_token(
    make_executor: MakeExecutor, layerwise: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(layerwise, tp_size)
    executor.run(Request(1, [*PROMPT]))
    victim = Request(2, [*PROMPT])
    cache = executor.scheduler._cache
    with monkeypatch.context() as patched:  # the server is lost between match and launch
        patched.setattr(cache, "launch", lambda *_, **__: False)
        executor.add(victim)
        executor.step_until(lambda: victim.is_over)
    assert victim.state == "failed"
    assert isinstance(victim.error, LoadLostError)  # type: ignore[attr-defined]
    assert len(victim.tokens) == len(PROMPT)
    again = Request(3, [*PROMPT])
    executor.run(again)
    assert again.num_matched == 20


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_layer_that_has_not_come_is_not_computed(
    make_executor: MakeExecutor, is_v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor("on", is_v2=is_v2)
    executor.run(Request(1, [*PROMPT]))
    worker = executor.ranks[0].worker
    names = [f"layer.{i}.{r}" for i in range(3) for r in ("key", "value")]
    names = names if is_v2 else [f"layer.{i}" for i in range(3)]
    ends = {name: number for number, name in enumerate(names, 1)}
    begun: list[LayerLoad] = []

    def load_first_layer(task_id: int, num_blocks: int) -> LayerLoad:
        load = LayerLoad(ends, num_blocks)
        load.begin_part()
        load.part_started(len(names) // 3, None)
        begun.append(load)
        return load

    monkeypatch.setattr(worker.client, "load_by_layer", load_first_layer)
    scheduler, request = executor.scheduler, Request(2, [*PROMPT])
    assert scheduler.get_num_new_matched_tokens(request, 0) == (20, False)
    scheduler.update_state_after_alloc(request, list(range(1, 7)))
    data = trtllm.RequestData(2, request.tokens, list(range(1, 7)), 0, 1)
    output = trtllm.SchedulerOutput(new_requests=[data])
    worker.bind_connector_meta(scheduler.build_connector_meta(output))
    worker.start_load_kv(None)
    worker.wait_for_layer_load(0, None)
    begun[0].end()
    with pytest.raises(LoadLostError, match="layer 1"):
        worker.wait_for_layer_load(1, None)
    with pytest.raises(LoadLostError):
        worker.wait_for_layer_load(2, None)
    worker.wait_for_save(None)
    assert scheduler.request_finished(request, list(range(1, 7)))  # its copy was never begun
    executor.step_until(lambda: scheduler._saves.take_ended([2]) == [2])


def test_the_ranks_of_an_engine_that_has_lost_them_find_nothing(
    make_executor: MakeExecutor,
) -> None:
    executor = make_executor()
    executor.run(Request(1, [*PROMPT]))
    executor.ranks[0].worker.client.close()
    until(lambda: not executor.scheduler.manager.is_ready())
    request = Request(2, [*PROMPT])
    executor.run(request)
    assert request.num_matched == 0


def test_fewer_blocks_than_were_matched_are_loaded(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.run(Request(1, [*PROMPT]))
    scheduler, request = executor.scheduler, Request(2, [*PROMPT])
    assert scheduler.get_num_new_matched_tokens(request, 0)[0] == 20
    scheduler.cancel_load(request, 12, 20)
    scheduler.update_state_after_alloc(request, [1, 2])
    (load,) = scheduler.build_connector_meta(trtllm.SchedulerOutput()).loads
    assert load.num_blocks == 2
    assert load.task_id is not None
    scheduler.manager.cancel([load.task_id])
    request.block_ids, request.state = [1, 2], "context"
    scheduler.request_finished(request, [1, 2])
    executor.step_until(lambda: request.request_id in scheduler._saves.take_ended([2]))


def test_kv_events_have_the_tokens_of_the_prompt(make_executor: MakeExecutor) -> None:
    executor = make_executor(kv_events="true")
    executor.run(Request(1, [*PROMPT]))
    (stored,) = executor.scheduler.manager.take_changes()
    assert stored.token_ids == PROMPT[:20]


@pytest.mark.parametrize(("setting", "value"), [
    ("pipeline_parallel_size", 2), ("context_parallel_size", 2), ("max_beam_width", 4),
    ("enable_attention_dp", True), ("speculative_config", object()),
    ("sparse_attention_config", object()),
])  # fmt: skip
def test_settings_that_cannot_be_served_are_refused_by_name(
    model_dir: Path, setting: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} = "):
        check_supported(arguments(model_dir, **{setting: value}))


@pytest.mark.parametrize(("setting", "value"), [
    ("host_cache_size", 1 << 30), ("max_attention_window", [1024]), ("dtype", "nvfp4"),
    ("enable_block_reuse", False),
])  # fmt: skip
def test_kv_caches_that_cannot_be_served_are_refused_by_name(
    model_dir: Path, setting: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_config.{setting} = "):
        check_supported(arguments(model_dir, kv={setting: value}))


@pytest.mark.parametrize("states", [
    {"hybrid_override_pattern": "M-M*"}, {"layer_types": ["linear_attention", "full_attention"]},
])  # fmt: skip
def test_models_with_states_are_refused(model_dir: Path, states: dict[str, Any]) -> None:
    (model_dir / "config.json").write_text(json.dumps(MODEL | states))
    with pytest.raises(ConfigError, match="Mamba"):
        check_supported(arguments(model_dir))


def test_a_model_is_read_from_its_checkpoint(model_dir: Path) -> None:
    model = read_model_config(arguments(model_dir, tensor_parallel_size=2), "id")
    assert (model.num_layers, model.num_kv_heads, model.head_size) == (3, 4, 16)
    assert (model.dtype, model.use_mla, model.tp_size) == (torch.bfloat16, False, 2)
    fp8 = arguments(model_dir, kv={"dtype": "fp8"})
    assert read_model_config(fp8, "id").dtype is torch.float8_e4m3fn
    digests = FileDigests(since_ns=ANY_TIME)
    assert read_model_id(fp8, digests) != read_model_id(arguments(model_dir), digests)
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (model_dir / "config.json").write_text(json.dumps(MODEL | latent))
    mla = read_model_config(arguments(model_dir), "id")
    assert (mla.use_mla, mla.num_kv_heads, mla.head_size) == (True, 1, 576)


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_supported(arguments(tmp_path / "nowhere"))


def test_another_block_size_is_refused(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="FLEXCACHE_TOKENS_PER_BLOCK"):
        make_executor(tokens_per_block=16)


def test_heads_in_shards_are_refused(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXCACHE_STORE_SHARDS", "2")
    with pytest.raises(ConfigError, match="store_shards = 2: must be tensor_parallel_size"):
        make_executor()


def test_layouts_that_cannot_be_moved_are_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="shape"):
        split_pool(torch.zeros(4, 4, 4))
    group = SimpleNamespace(window_size=512, regions=())
    with pytest.raises(UnsupportedLayoutError, match="512"):
        split_regions(SimpleNamespace(groups=(group,)))


def test_a_salt_is_read_by_the_name_of_each_release() -> None:
    scopes, old = Scopes(), SimpleNamespace(cache_salt_id=7)
    assert scopes.read(old) == scopes.read(SimpleNamespace(cache_salt=7))
    assert scopes.read(old) != scopes.read(SimpleNamespace())
