"""Loads within the step that computes with them, in a real vLLM engine in this process."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import PATIENCE_S, until
from engines import Engine, make_prompt
from paths import MODELS
from probe_connector import compare_probes
from test_processes import _cpu_flags, assert_exact, run
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from flexcache.errors import ConfigError, LoadLostError
from flexcache.integration.adapter import LayerwiseRule
from flexcache.integration.vllm.step_loads import StepBudget, StepLoads, find_obstacle
from flexcache.transfer import device_worker
from flexcache.transfer.gates import LayerLoad

# vLLM's second runner does not recover from a load lost in a step: none runs there.
pytestmark = pytest.mark.runners
BLOCK = 32
_seeds = itertools.count(5001)


class Watch:
    """Records what the workers had to load, and whether by layer."""

    def __init__(self, engine: Engine) -> None:
        self.loads: list[Any] = []
        side = engine.scheduler.connector._scheduler
        self._take_step = side.take_step

    def take_step(self, scheduled: Any) -> Any:
        metadata = self._take_step(scheduled)
        self.loads.extend(metadata.loads)
        return metadata

    @property
    def by_layer(self) -> list[bool]:
        return [load.promised is not None for load in self.loads]


@pytest.fixture
def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """An initially empty engine that loads by layer whenever it can, one layer at a time."""
    side = engine.scheduler.connector._scheduler
    monkeypatch.setattr(side.gets, "layerwise", LayerwiseRule("on", None))
    monkeypatch.setattr(device_worker, "_MIN_PART_BYTES", 0)
    engine.forget_all()
    for path in engine.probe_dir.glob("*.jsonl"):
        path.unlink()
    watch = Watch(engine)
    monkeypatch.setattr(side, "take_step", watch.take_step)
    yield watch
    engine.drain()
    engine.manager.check()


@pytest.fixture
def on_the_gpu() -> dict[str, torch.Tensor]:
    return get_kv_transfer_group()._layers


def scrub(layers: dict[str, torch.Tensor]) -> None:
    """Overwrite the GPU's blocks, so that results computed from missing loads are visible."""
    for tensor in layers.values():
        tensor.normal_(0, 3)


def serve_again(
    engine: Engine, prompt: list[int], layers: dict[str, torch.Tensor]
) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt came from a cache other than the GPU's."""
    engine.forget_gpu()
    scrub(layers)
    output = engine.generate(prompt)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def tokens_of(engine: Engine, prompt: list[int]) -> list[int]:
    return list(engine.generate(prompt).outputs[0].token_ids)


def client_worker() -> Any:
    return get_kv_transfer_group()._worker.client._worker


# -- loads that arrive ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [33, 65, 500, 1500])
def test_a_prompt_comes_back_within_a_step_with_equal_tokens_and_bytes(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor], num_tokens: int
) -> None:
    prompt = make_prompt(num_tokens, next(_seeds))
    cold = tokens_of(engine, prompt)
    assert serve_again(engine, prompt, on_the_gpu) == (cold, num_tokens // BLOCK * BLOCK)
    assert watch.by_layer == [True]
    seen = compare_probes(engine.probe_dir)
    assert (seen["loaded"], seen["different"]) == (num_tokens // BLOCK, [])


def test_negative_control_missing_loads_are_noticed(
    engine: Engine,
    watch: Watch,
    on_the_gpu: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = make_prompt(500, next(_seeds))
    cold = tokens_of(engine, prompt)
    client = get_kv_transfer_group()._worker.client
    load, skipped = client.load_promised, []

    def skip(*arguments: Any) -> LayerLoad:
        skipped.append(arguments)
        nothing = LayerLoad({}, 1)
        nothing.part_started(0, None)
        return nothing

    with monkeypatch.context() as patch:
        patch.setattr(client, "load_promised", skip)
        tokens, _ = serve_again(engine, prompt, on_the_gpu)
    assert load(*skipped[0]).wait_all(None)
    engine.forget_all()
    assert tokens != cold


def test_a_prompt_with_nothing_left_to_compute_waits_between_steps(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    prompt = make_prompt(4 * BLOCK, next(_seeds))
    cold = tokens_of(engine, prompt)
    assert serve_again(engine, prompt, on_the_gpu) == (cold, 4 * BLOCK)
    assert watch.by_layer == [False]


def test_blocks_on_ssd_are_waited_for_between_steps(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    prompt = make_prompt(300, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.settle()
    engine.forget_gpu()
    engine.manager.clear("CPU")
    assert serve_again(engine, prompt, on_the_gpu) == (cold, 288)
    assert watch.by_layer == [False]


def test_the_local_prefix_is_kept_and_the_rest_loaded(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    prompt = make_prompt(400, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.forget_gpu()
    scrub(on_the_gpu)
    engine.generate(prompt[:200])
    assert tokens_of(engine, prompt) == cold
    assert watch.by_layer == [True, True]
    seen = compare_probes(engine.probe_dir)
    assert (seen["loaded"], seen["different"]) == (12, [])


def test_a_rest_longer_than_a_scheduling_chunk_is_computed_in_steps(
    engine: Engine,
    watch: Watch,
    on_the_gpu: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 96)
    shared = make_prompt(500, next(_seeds))
    prompt = shared + make_prompt(400, next(_seeds))
    engine.generate(shared)
    tokens, cached = serve_again(engine, prompt, on_the_gpu)
    assert cached == 480
    assert watch.by_layer == [True]
    engine.forget_all()
    assert tokens_of(engine, prompt) == tokens


def test_requests_compute_with_what_is_loaded_for_another_in_their_step(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    shared = make_prompt(256, next(_seeds))
    prompts = [shared + make_prompt(100, next(_seeds)) for _ in range(5)]
    cold = [o.outputs[0].token_ids for o in engine.generate_all(prompts)]
    engine.forget_gpu()
    scrub(on_the_gpu)
    steps: list[int] = []
    take_step = watch._take_step

    def note(scheduled: Any) -> Any:
        metadata = take_step(scheduled)
        steps.append(len(metadata.loads))
        return metadata

    watch._take_step = note
    warm = engine.generate_all(prompts)
    assert [o.outputs[0].token_ids for o in warm] == cold
    assert all(o.num_cached_tokens == 352 for o in warm)
    assert max(steps) == 5
    seen = compare_probes(engine.probe_dir)
    assert seen["different"] == []
    assert seen["loaded"] == 8 + 5 * 3  # what is shared only once


def test_several_loads_in_one_step(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    prompts = [make_prompt(150 + 40 * i, next(_seeds)) for i in range(4)]
    cold = [o.outputs[0].token_ids for o in engine.generate_all(prompts)]
    engine.forget_gpu()
    scrub(on_the_gpu)
    assert [o.outputs[0].token_ids for o in engine.generate_all(prompts)] == cold
    assert watch.by_layer == [True] * 4
    assert compare_probes(engine.probe_dir)["different"] == []


def test_a_request_that_ends_with_its_first_token_leaves_nothing_behind(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor]
) -> None:
    prompt = make_prompt(300, next(_seeds))
    engine.generate(prompt)
    for _ in range(3):
        engine.forget_gpu()
        assert engine.generate(prompt, max_tokens=1).num_cached_tokens == 288
    engine.settle()
    engine.scheduler.connector._scheduler.check_idle()
    worker = get_kv_transfer_group()._worker
    until(
        lambda: not client_worker().gates.layer_loads
    )  # the rank hears of the end after the server
    assert not (worker._loads or worker.client.wait_ended(0))
    assert engine.manager.stats()["tiers"]["CPU"]["leased"] == 0


def lost_load() -> LayerLoad:
    load = LayerLoad({"a": 1, "b": 2}, 1)
    load.end()
    return load


def test_a_step_waits_for_whole_loads_until_all_layers_were_announced_once() -> None:
    """A lost load shows which layers are waited for."""
    loads = StepLoads(["a", "b"])
    for name in ("an encoder's", "a"):
        loads.before_layer(name)
    loads.add(lost_load())
    with pytest.raises(LoadLostError):
        loads.before_step()
    with pytest.raises(LoadLostError):
        loads.before_layer("b")
    loads.before_step()
    with pytest.raises(LoadLostError, match="layerwise_load = off"):
        loads.finish()


def test_a_step_that_a_graph_may_replay_waits_for_whole_loads() -> None:
    loads = StepLoads(["a"], has_graphs=True)
    loads.before_layer("a")
    loads.add(lost_load())
    with pytest.raises(LoadLostError):
        loads.before_step()


# -- beside other requests -----------------------------------------------------------------------


@pytest.fixture
def auto(engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many seconds a token takes to load, as far as is known."""
    gets = engine.scheduler.connector._scheduler.gets
    monkeypatch.setattr(gets, "layerwise", LayerwiseRule("auto", None))

    def use(seconds: float) -> None:
        budget = StepBudget(lambda: (1_000_000, 1_000_000 * seconds), 0.0)
        monkeypatch.setattr(gets, "budget", budget)

    return use


def serve_beside(engine: Engine, running: list[int], hit: list[int]) -> list[list[tuple[str, int]]]:
    """Serve ``hit`` while ``running`` generates; return for each step from the arrival of the hit
    on which requests got a token, and which."""
    llm_engine, steps = engine.llm.llm_engine, []
    for name, prompt, count in (("running", running, 24), ("hit", hit, 8)):
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        # Two steps of a token each have to have ended before it is known how long they take.
        for _ in range(4 if name == "running" else 40):
            outputs = llm_engine.step()
            if name == "hit":
                steps.append([(o.request_id, o.outputs[0].token_ids[-1]) for o in outputs])
    assert not llm_engine.has_unfinished_requests()
    return steps


def test_a_short_load_runs_within_a_step_that_others_compute_in(
    engine: Engine,
    watch: Watch,
    auto: Callable[[float], None],
    on_the_gpu: dict[str, torch.Tensor],
) -> None:
    running, hit = make_prompt(40, next(_seeds)), make_prompt(300, next(_seeds))
    cold = tokens_of(engine, hit)
    engine.forget_gpu()
    scrub(on_the_gpu)
    auto(1e-9)
    steps = serve_beside(engine, running, hit)
    names = [[name for name, _ in step] for step in steps]
    assert names.index(["running", "hit"]) <= 1  # the step before may be scheduled already
    assert [token for step in steps for name, token in step if name == "hit"] == cold
    assert watch.by_layer == [True]
    assert compare_probes(engine.probe_dir)["different"] == []


def test_a_long_load_is_waited_for_between_steps_while_others_compute(
    engine: Engine, watch: Watch, auto: Callable[[float], None]
) -> None:
    running, hit = make_prompt(40, next(_seeds)), make_prompt(300, next(_seeds))
    engine.generate(hit)
    engine.forget_gpu()
    auto(1.0)
    steps = serve_beside(engine, running, hit)
    assert [name for name, _ in steps[0]] == ["running"]
    assert watch.by_layer == [False]


@pytest.mark.first_runner
@pytest.mark.parametrize("begins_late", [False, True])
def test_copies_begin_before_inputs_are_prepared_if_they_may(
    engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch, begins_late: bool
) -> None:
    worker, order = get_kv_transfer_group()._worker, []
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = runner.model_runner
    load, update, take_step = worker.client.load_promised, runner._update_states, watch.take_step

    def note_load(*arguments: Any) -> Any:
        order.append("load")
        return load(*arguments)

    def note_update(scheduled: Any) -> Any:
        order.append("prepare")
        return update(scheduled)

    def telling(scheduled: Any) -> Any:
        return dataclasses.replace(take_step(scheduled), begins_late=begins_late)

    prompt = make_prompt(300, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.forget_gpu()
    monkeypatch.setattr(worker.client, "load_promised", note_load)
    monkeypatch.setattr(runner, "_update_states", note_update)
    monkeypatch.setattr(engine.scheduler.connector._scheduler, "take_step", telling)
    assert tokens_of(engine, prompt) == cold
    expected = ["prepare", "load"] if begins_late else ["load", "prepare"]
    assert order[:2] == expected


@pytest.mark.parametrize(
    ("cleared", "has_siblings", "expected"),
    [(None, False, False), ([7], False, True), (None, True, True)],
)
def test_copies_begin_late_if_blocks_are_cleared_or_siblings_save_them(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    cleared: list[int] | None,
    has_siblings: bool,
    expected: bool,
) -> None:
    """Siblings save blocks that are reused when they are told of preemptions, one by one."""
    side = engine.scheduler.connector._scheduler
    monkeypatch.setattr(side, "_has_siblings", has_siblings)
    step = SimpleNamespace(num_scheduled_tokens={}, new_block_ids_to_zero=cleared)
    assert side.take_step(step).begins_late is expected
    list(side.take_events())  # it has ended


# -- whatever happens ---------------------------------------------------------------------------


def promise_nothing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.manager, "promise", lambda task_id: None)


def begin_late(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Stop the rank's thread until the engine waits for a layer."""
    worker, is_waited_for = client_worker(), threading.Event()
    step_loads = get_kv_transfer_group()._worker.step_loads
    advance, before_layer = worker.advance, step_loads.before_layer

    def late(**options: Any) -> Any:
        if worker.gates.layer_loads:
            is_waited_for.wait(PATIENCE_S)
        return advance(**options)

    def wait(name: str) -> None:
        if step_loads._loads:
            is_waited_for.set()
        before_layer(name)

    patch.setattr(worker, "advance", late)
    patch.setattr(step_loads, "before_layer", wait)


def replay_a_graph(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """No layer is announced."""
    step_loads = get_kv_transfer_group()._worker.step_loads
    patch.setattr(step_loads, "_has_graphs", True)
    patch.setattr(step_loads, "before_layer", lambda name: None)


def before_the_step(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something between the schedule of a step with a promised load and the step."""
    worker = get_kv_transfer_group()._worker
    begin = worker.begin_step

    def do_and_begin(metadata: Any) -> None:
        if any(load.promised for load in metadata.loads):
            do()
        begin(metadata)

    patch.setattr(worker, "begin_step", do_and_begin)


def clear_the_cache(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    before_the_step(patch, engine.manager.reset)


def change_weights(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    before_the_step(patch, get_kv_transfer_group()._worker.client.weights_changed)


EVENTS = [promise_nothing, begin_late, replay_a_graph, clear_the_cache, change_weights]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_no_load_is_lost_within_a_step(
    engine: Engine,
    watch: Watch,
    on_the_gpu: dict[str, torch.Tensor],
    event: Callable[[Engine, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = make_prompt(600, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.settle()
    engine.forget_gpu()
    scrub(on_the_gpu)
    with monkeypatch.context() as patch:
        event(engine, patch)
        assert tokens_of(engine, prompt) == cold
        engine.settle()
    assert watch.by_layer == [event is not promise_nothing]
    assert compare_probes(engine.probe_dir)["different"] == []
    assert tokens_of(engine, prompt) == cold
    assert engine.manager.stats()["tiers"]["CPU"]["leased"] == 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.drain()
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    engine.forget_all()
    assert tokens_of(engine, prompt) == cold
    assert serve_again(engine, prompt, on_the_gpu) == (cold, 576)


@pytest.mark.parametrize("within", [False, True])
def test_blocks_that_were_loaded_for_an_aborted_request_are_whole(
    engine: Engine, watch: Watch, on_the_gpu: dict[str, torch.Tensor], within: bool
) -> None:
    """Aborted after its step, or between the model's run and the end of the step."""
    prompt = make_prompt(600, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.settle()
    engine.forget_gpu()
    scrub(on_the_gpu)
    core = engine.llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling)
    if within:
        core.aborts_queue.put(list(core.scheduler.requests))
    engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(["aborted"])
    engine.settle()
    assert watch.by_layer == [True]
    engine.scheduler.connector._scheduler.check_idle()
    output = engine.generate(prompt)
    assert (list(output.outputs[0].token_ids), output.num_cached_tokens) == (cold, 576)
    assert watch.by_layer == [True]  # from the GPU
    assert compare_probes(engine.probe_dir)["different"] == []


def test_what_vllm_has_no_room_for_is_promised_to_no_step(
    engine: Engine,
    watch: Watch,
    on_the_gpu: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM asks, and then does not allocate: the load is cancelled, and promised again later."""
    prompt = make_prompt(600, next(_seeds))
    cold = tokens_of(engine, prompt)
    engine.settle()
    engine.forget_gpu()
    scrub(on_the_gpu)
    manager, refused = engine.scheduler.kv_cache_manager, []
    allocate = manager.allocate_slots

    def refuse(request: Any, *arguments: Any, **options: Any) -> Any:
        if len(refused) < 3:
            refused.append(engine.manager.stats()["tiers"]["CPU"]["leased"])
            return None
        return allocate(request, *arguments, **options)

    monkeypatch.setattr(manager, "allocate_slots", refuse)
    assert tokens_of(engine, prompt) == cold
    assert watch.by_layer == [True]
    engine.settle()
    assert engine.manager.stats()["tiers"]["CPU"]["leased"] == 0


# -- what decides --------------------------------------------------------------------------------


def test_loads_run_within_steps_of_engines_that_schedule_ahead() -> None:
    assert find_obstacle(config_with(async_scheduling=True)) is None
    assert "groups" in str(find_obstacle(config_with(), has_groups=True))


def test_on_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"layerwise_load = 'on': some reason"):
        LayerwiseRule("on", "some reason")
    assert not LayerwiseRule("auto", "some reason").allows("any")


def config_with(async_scheduling: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
    )


def test_auto_loads_by_layer_while_nothing_else_runs() -> None:
    rule = LayerwiseRule("auto", None)
    assert rule.allows("a")
    rule.step({"a": 5, "b": 1})
    assert not rule.allows("c")
    rule.finished("a")
    rule.finished("b")
    assert rule.allows("c")
    assert not LayerwiseRule("off", None).allows("a")


# -- other engines -------------------------------------------------------------------------------

ON = {"layerwise_load": "on"}


@pytest.fixture(scope="module", autouse=True)
def _models() -> None:
    from make_models import make_model

    for name in ("tiny", "hybrid", "mla"):
        make_model(MODELS, name)


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_workers_in_separate_processes(tp_size: int) -> None:
    options = {
        "model": "tiny",
        "prompts": [700, 900, 65, 64, 63],
        "cpu_blocks": 512,
        "extra": ON,
        "engine": {"tensor_parallel_size": tp_size},
    }
    seen = run(options)
    assert_exact(seen, tp_size, [672, 896, 64, 64, 32])
    assert seen["probes"]["by_layer"] == (seen["probes"]["loaded"] - 2 * tp_size)  # 64 is whole


@pytest.mark.whole
def test_preemption_under_a_small_pool_changes_nothing() -> None:
    options = {
        "model": "tiny",
        "prompts": [210] * 6,
        "max_tokens": 200,
        "together": True,
        "cpu_blocks": 512,
        "extra": ON,
        "engine": {"num_gpu_blocks_override": 40, "max_model_len": 1024},
    }
    seen = run(options, in_process=True)
    assert seen["preemptions"] > 0
    assert all(seen["tokens_equal"])
    assert seen["probes"]["different"] == []
    assert seen["probes"]["by_layer"] > 0


@pytest.mark.whole
def test_a_hybrid_model_with_all_layers_in_one_group() -> None:
    options = {
        "model": "hybrid",
        "prompts": [700, 33],
        "cpu_blocks": 512,
        "extra": ON,
        "engine": {"disable_hybrid_kv_cache_manager": True},
    }
    seen = run(options, in_process=True)
    assert_exact(seen, 1, [672, 32])
    assert seen["probes"]["by_layer"] == 22


@pytest.mark.whole
def test_latent_attention() -> None:
    block = 32 if "amx_tile" in _cpu_flags() else 16
    options = {
        "model": "mla",
        "prompts": [201, 101],
        "cpu_blocks": 512,
        "extra": ON,
        "engine": {"block_size": block, "kv_cache_memory_bytes": 64 << 20},
    }
    seen = run(options, in_process=True)
    assert seen["probes"]["different"] == []
    assert seen["probes"]["by_layer"] >= 200 // block + 100 // block - 2
