"""Weights and adapters of SGLang that change: KV of others is neither found nor stored."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from make_models import make_adapter, make_model
from paths import MODELS
from safetensors.torch import load_file, save_file
from sglang_engine import PAGE, TinyEngine, apart, linker_options, prompt
from sglang_engine import manager_of as manager_of_linker
from sglang_engine import settle as settle_linker
from stores import PATIENT, store_at
from test_hicache_storage import manager_of as manager_of_storage
from test_hicache_storage import settle as settle_storage
from test_hicache_storage import storage_options

KINDS = ["linker", "storage"]
BEFORE, AFTER, LONGER, FRESH = prompt(200), prompt(200, seed=4), prompt(300), prompt(200, seed=9)


def start(kind: str, place: str, **more: Any) -> TinyEngine:
    """Start an engine with a tier that outlives it: an SSD's directory, or the URL of a store."""
    if "://" in place:
        extra: dict[str, Any] = {"remote_url": place, **PATIENT}
    else:
        extra = {"num_ssd_blocks": 400, "ssd_cache_dirs": [place]}
    if kind == "linker":
        extra = {"num_cpu_blocks": 200, "skip_slow_loads": False, **extra}
        engine = TinyEngine(**linker_options(**extra), **more)
    else:
        extra = {"num_cpu_blocks": 64, **extra}
        engine = TinyEngine(**storage_options("page_first_direct", flexcache=extra), **more)
    if "://" in place:
        engine.step_until(lambda: manager_of(kind, engine).stats()["tiers"]["REMOTE"]["available"])
    return engine


def manager_of(kind: str, engine: TinyEngine) -> Any:
    return (manager_of_linker if kind == "linker" else manager_of_storage)(engine)


def settle(kind: str, engine: TinyEngine) -> None:
    (settle_linker if kind == "linker" else settle_storage)(engine)


def ask(kind: str, engine: TinyEngine, tokens: list[int], **fields: Any) -> tuple[int, list[int]]:
    """Return how many tokens came from a cache, and what was generated. All is stored then."""
    request = engine.generate(tokens, **fields)
    settle(kind, engine)
    return request.cached_tokens, list(request.output_ids)


def expect(
    kind: str, engine: TinyEngine, tokens: list[int], cached: int, answer: list[int], **more: Any
) -> None:
    """Check how much of a prompt comes from a cache, and the answer."""
    found = ask(kind, engine, tokens, **more)
    assert found == (cached, answer), f"cached and generated: {found}, not {(cached, answer)}"


def close(kind: str, engine: TinyEngine) -> None:
    if kind == "storage":
        engine.tree.cache_controller.detach_storage_backend()
    else:
        engine.tree.linker.close()


def retrain(model: Path) -> None:
    """Change the weights in a directory, and nothing else."""
    file = next(model.glob("*.safetensors"))
    random = torch.Generator().manual_seed(7)
    weights = {
        name: tensor + torch.randn(tensor.shape, generator=random).to(tensor.dtype) / 8
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


def check_reference(path: str, answers: str, prompts: list[list[int]]) -> None:
    engine = TinyEngine(path=path)
    found = [list(engine.generate(tokens).output_ids) for tokens in prompts]
    Path(answers).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models "first" and "second", and the answers of the second."""
    made = tmp_path_factory.mktemp("models")
    tiny = make_model(MODELS, "tiny")
    for name in ("first", "second"):
        shutil.copytree(tiny, made / name)
    retrain(made / "second")
    apart(check_reference, str(made / "second"), str(made / "answers"), [BEFORE, AFTER])
    return made


def check_updates(kind: str, directory: str, place: str, seen: str) -> None:
    models = Path(directory)
    first, second = str(models / "first"), str(models / "second")
    of_before, of_after = json.loads((models / "answers").read_text())
    engine = start(kind, place, path=first)
    _, cold = ask(kind, engine, BEFORE)
    assert cold != of_before
    engine.update_weights(second)
    expect(kind, engine, BEFORE, 0, of_before)
    expect(kind, engine, AFTER, 0, of_after)
    engine.flush()
    expect(kind, engine, BEFORE, 192, of_before)  # its new name caches, too
    engine.update_weights(first, flush=False)
    stale, _ = ask(kind, engine, LONGER)  # as without a cache of ours
    assert stale >= 192
    engine.flush()
    expect(kind, engine, BEFORE, 0, cold)
    again = ask(kind, engine, LONGER)

    running = engine.add(AFTER, 40)
    engine.step_until(lambda: len(running.output_ids) > 8)
    engine.update_weights(second, flush=False)
    engine.step_until(running.finished)
    settle(kind, engine)
    engine.flush()
    expect(kind, engine, AFTER, 0, of_after)
    engine.flush()
    expect(kind, engine, AFTER, 192, of_after)
    manager_of(kind, engine).check()
    Path(seen).write_text(json.dumps([cold, again]))
    close(kind, engine)


def check_restart(kind: str, directory: str, place: str, seen: str) -> None:
    cold, again = json.loads(Path(seen).read_text())
    _, of_after = json.loads((Path(directory) / "answers").read_text())
    engine = start(kind, place, path=str(Path(directory) / "first"))
    expect(kind, engine, BEFORE, 192, cold)
    num_cached, answer = ask(kind, engine, AFTER)
    assert num_cached == 0, f"{num_cached} cached, {answer}; the second model's is {of_after}"
    assert answer != of_after
    assert ask(kind, engine, LONGER)[1] == again[1]
    if kind == "storage":
        engine.tree.cache_controller.storage_backend.clear()
        _, fresh = ask(kind, engine, FRESH)
        engine.flush()
        expect(kind, engine, FRESH, 192, fresh)  # HiCache's own pages were as good as before
        expect(kind, engine, BEFORE, 0, cold)
    close(kind, engine)


PLACES = [
    pytest.param(kind, place, marks=[] if (kind, place) == ("linker", "ssd") else pytest.mark.whole)
    for kind in KINDS
    for place in ("ssd", "file", "mooncake")
]


@contextmanager
def outliving(place: str, tmp_path: Path) -> Iterator[str]:
    """Return what `start` takes: a directory, or the URL of a store that runs."""
    if place == "ssd":
        yield str(tmp_path / "ssd")
    else:
        with store_at(place, tmp_path) as url:
            yield url


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_weights_updated_in_place(kind: str, place: str, models: Path, tmp_path: Path) -> None:
    with outliving(place, tmp_path) as tier:
        arguments = kind, str(models), tier, str(tmp_path / "seen")
        apart(check_updates, *arguments)
        apart(check_restart, *arguments)


RUNNING = [prompt(100 + 16 * number, seed=20 + number) for number in range(7)]
LAST = prompt(900, 27)
"""Computed in steps: the update comes between them."""
AT_ONCE = {"max_running_requests": 8, "max_total_tokens": 8192, "chunked_prefill_size": 128}


def check_running(kind: str, directory: str, ssd: str, mode: str) -> None:
    from sglang.srt.managers import io_struct

    second, expected = str(Path(directory) / "second"), answers_of(directory, "second")
    engine = start(kind, ssd, path=str(Path(directory) / "first"), **AT_ONCE)
    requests = [engine.add(tokens, 40) for tokens in RUNNING]
    engine.step_until(lambda: all(len(request.output_ids) for request in requests))
    requests.append(engine.add(LAST, 40))
    engine.step_until(lambda: engine.scheduler.chunked_req is not None)
    assert not any(request.finished() for request in requests)
    if mode != "none":
        engine.scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode=mode))
    while mode == "retract" and not engine.scheduler.is_fully_idle(ignore_waiting=True):
        engine.tree.check_hicache_events()  # SGLang refuses to flush while HiCache copies
    engine.update_weights(second, flush=mode == "retract")
    manager_of(kind, engine).new_weights("v2")
    if mode != "none":
        engine.scheduler.continue_generation(io_struct.ContinueGenerationReqInput())
    engine.step_until(lambda: all(request.finished() for request in requests))
    assert all(len(request.output_ids) == 40 for request in requests)
    settle(kind, engine)
    engine.flush()
    for tokens, answer in zip([*RUNNING, LAST], expected, strict=True):
        num_cached, found = ask(kind, engine, tokens)
        assert found == answer
        assert not num_cached or mode == "retract", "computed again, with the second model alone"
    engine.flush()
    manager_of(kind, engine).clear("CPU")
    expect_all(kind, engine, expected)
    close(kind, engine)


def answers_of(directory: str, model: str) -> Any:
    return json.loads(Path(directory, f"{model}-running").read_text())


def expect_all(kind: str, engine: TinyEngine, expected: list[list[int]]) -> None:
    """Check that each prompt comes from SSD, all that SGLang loads of it."""
    before = manager_of(kind, engine).stats()["engine"]["hit_blocks"].get("SSD", 0)
    wanted = 0
    for tokens, answer in zip([*RUNNING, LAST], expected, strict=True):
        expect(kind, engine, tokens, (len(tokens) - 1) // PAGE * PAGE, answer)
        wanted += (len(tokens) - 1) // PAGE
    found = manager_of(kind, engine).stats()["engine"]["hit_blocks"]["SSD"] - before
    assert found >= wanted, f"{found} blocks from SSD, not {wanted}"


def check_after_running(kind: str, directory: str, ssd: str) -> None:
    engine = start(kind, ssd, path=str(Path(directory) / "first"), **AT_ONCE)
    for tokens, answer in zip([*RUNNING, LAST], answers_of(directory, "first"), strict=True):
        assert ask(kind, engine, tokens)[1] == answer
    engine.update_weights(str(Path(directory) / "second"))
    manager_of(kind, engine).new_weights("v2")
    expect_all(kind, engine, answers_of(directory, "second"))
    close(kind, engine)


@pytest.fixture(scope="module")
def running(models: Path) -> Path:
    """The models, and what each answers without a cache to prompts that run together."""
    for name in ("first", "second"):
        apart(
            check_reference, str(models / name), str(models / f"{name}-running"), [*RUNNING, LAST]
        )
    assert answers_of(str(models), "first") != answers_of(str(models), "second")
    return models


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["none", "in_place", "retract"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_run_across_an_update_leave_nothing_of_two_weights(
    kind: str, mode: str, running: Path, tmp_path: Path
) -> None:
    arguments = kind, str(running), str(tmp_path / "ssd")
    apart(check_running, *arguments, mode)
    apart(check_after_running, *arguments)


def start_with_adapters(
    kind: str, place: str, adapters: dict[str, str]
) -> tuple[TinyEngine, list[str]]:
    """Start an engine with adapters, by their names; return it and SGLang's numbers of them."""
    from sglang.srt.lora.lora_registry import LoRARef

    loaded = [  # as SGLang makes them from its command line
        LoRARef(LoRARef.deterministic_id(name, path), name, path, False)
        for name, path in adapters.items()
    ]
    engine = start(
        kind, place, enable_lora=True, lora_backend="torch_native", max_loras_per_batch=4,
        lora_paths=loaded,
    )  # fmt: skip
    return engine, [adapter.lora_id for adapter in loaded]


def check_adapter(kind: str, tuned: str, place: str, seen: str) -> None:
    engine, (number,) = start_with_adapters(kind, place, {"tuned": tuned})
    base, answer = ask(kind, engine, BEFORE), ask(kind, engine, BEFORE, lora_id=number)
    assert base[0] == answer[0] == 0
    assert base[1] != answer[1]
    Path(seen).write_text(json.dumps(answer[1]))
    close(kind, engine)


def check_retrained(kind: str, tuned: str, former: str, place: str, seen: str) -> None:
    answer = json.loads(Path(seen).read_text())
    engine, numbers = start_with_adapters(kind, place, {"tuned": tuned, "other": former})
    retrained = ask(kind, engine, BEFORE, lora_id=numbers[0])
    assert retrained[0] == 0, f"{retrained}; the former adapter's answer was {answer}"
    assert retrained[1] != answer
    expect(kind, engine, BEFORE, 192, answer, lora_id=numbers[1])
    engine.flush()
    number = engine.load_adapter("again", tuned)
    expect(kind, engine, BEFORE, 192, retrained[1], lora_id=number)
    close(kind, engine)


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_an_adapter_is_known_by_its_content(kind: str, place: str, tmp_path: Path) -> None:
    tuned, former = tmp_path / "tuned", tmp_path / "former"
    shutil.copytree(make_adapter(MODELS, 1), tuned)
    shutil.copytree(tuned, former)
    with outliving(place, tmp_path) as tier:
        seen = str(tmp_path / "seen")
        apart(check_adapter, kind, str(tuned), tier, seen)
        retrain(tuned)
        apart(check_retrained, kind, str(tuned), str(former), tier, seen)


def check_other_updates(directory: str, ssd: str) -> None:
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    engine = start("linker", ssd, path=str(Path(directory) / "first"))
    updater = engine.scheduler.weight_updater
    _, cold = ask("linker", engine, BEFORE)
    engine.flush()
    expect("linker", engine, BEFORE, 192, cold)
    name = "model.layers.0.self_attn.k_proj.weight"
    weights = load_file(Path(directory) / "second" / "model.safetensors")
    data = MultiprocessingSerializer.serialize([(name, weights[name])])
    engine.flush()
    assert updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput()).success
    assert updater.update_weights_from_tensor(
        io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[data], flush_cache=False
        )
    ).success
    assert updater.end_weight_update(io_struct.EndWeightUpdateReqInput()).success
    num_cached, changed = ask("linker", engine, BEFORE)
    assert num_cached == 0, f"{num_cached} cached, {changed}"
    assert changed != cold
    engine.flush()  # nothing was cached while they changed: what came after is stored
    expect("linker", engine, BEFORE, 192, changed)
    engine.flush()
    updater.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=["weights"]))
    updater.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(tags=["weights"]))
    expect("linker", engine, BEFORE, 0, changed)
    engine.flush()
    expect("linker", engine, BEFORE, 192, changed)  # its new name


def test_every_way_to_change_weights_is_noticed(models: Path, tmp_path: Path) -> None:
    apart(check_other_updates, str(models), str(tmp_path))


def check_attached(directory: str, ssd: str) -> None:
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput

    models = Path(directory)
    of_before, _ = json.loads((models / "answers").read_text())
    settings = storage_options("page_first_direct", ssd)
    backend = settings.pop("hicache_storage_backend")
    extra = settings.pop("hicache_storage_backend_extra_config")
    policy = settings.pop("hicache_storage_prefetch_policy")
    engine = TinyEngine(path=str(models / "first"), **settings)

    def attach() -> None:
        answer = engine.scheduler.attach_hicache_storage_wrapped(
            AttachHiCacheStorageReqInput(
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config_json=extra,
                hicache_storage_prefetch_policy=policy,
            )
        )
        assert answer.success, answer.message

    attach()
    ask("storage", engine, BEFORE)
    engine.tree.detach_storage_backend()
    engine.update_weights(str(models / "second"), flush=False)
    attach()
    ask("storage", engine, LONGER)  # behind SGLang's own pages of the first weights
    engine.flush()
    expect("storage", engine, BEFORE, 0, of_before)
    engine.flush()
    expect("storage", engine, BEFORE, 192, of_before)


@pytest.mark.whole
def test_a_storage_is_attached_after_an_update(models: Path, tmp_path: Path) -> None:
    apart(check_attached, str(models), str(tmp_path))


def check_unknown(directory: str, ssd: str) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    del WeightUpdater.update_weights_from_ipc
    engine = start("linker", ssd, path=str(Path(directory) / "first"))
    _, cold = ask("linker", engine, BEFORE)
    engine.flush()
    assert ask("linker", engine, BEFORE) == (192, cold)
    engine.update_weights(str(Path(directory) / "second"))
    for _ in range(2):
        assert ask("linker", engine, BEFORE)[0] == 0
        engine.flush()


@pytest.mark.whole
def test_an_sglang_that_cannot_be_watched_caches_until_an_update(
    models: Path, tmp_path: Path
) -> None:
    apart(check_unknown, str(models), str(tmp_path))


def check_identity(directory: str) -> None:
    from sglang.srt.server_args import ServerArgs
    from sglang_engine import options

    from flexcache.integration.file_digests import FileDigests
    from flexcache.integration.sglang.rank import read_model_id

    def identify(**more: Any) -> tuple[str, bool]:
        digests = FileDigests()
        settings = ServerArgs(**options(model_path=str(Path(directory) / "first"), **more))
        return read_model_id(settings, "", digests), digests.problem is None

    scales = [str(Path(directory) / name / "scales.json") for name in ("a", "same", "other")]
    ids = [identify(), *(identify(quantization_param_path=path) for path in scales)]
    assert all(is_known for _, is_known in ids)
    assert ids[1] == ids[2]
    assert len(set(ids)) == 3
    assert not identify(load_format="remote")[1]


@pytest.mark.whole
def test_all_files_that_sglang_loads_identify_a_model(models: Path) -> None:
    for name, content in {"a": "{}", "same": "{}", "other": "[]"}.items():
        (models / name).mkdir()
        (models / name / "scales.json").write_text(content)
    apart(check_identity, str(models))


def check_not_waiting(adapter: str, cache: str) -> None:
    from flexcache.integration.sglang.rank import RankCache
    from flexcache.integration.sglang.weights import SglangWeights

    hooks: dict[str, Callable[..., Any]] = {}
    weights = SglangWeights()
    weights.install(lambda name, hook, kind: hooks.update({name.rpartition(".")[2]: hook}))
    rank = cast(RankCache, Rank())
    weights.watch(rank, None)
    time.sleep = lambda _: pytest.fail("the engine's thread waits")
    loading = SimpleNamespace(lora_id="7" * 32, lora_path=adapter)
    with Path(cache, "flexcache", "digests").open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        result = SimpleNamespace(success=True)
        assert hooks["_load_lora_adapter"](lambda *_: result, None, loading) is result


class Rank:
    """A rank of which nothing is asked."""


def test_the_engines_thread_does_not_wait_for_another_process_that_hashes(tmp_path: Path) -> None:
    (tmp_path / "flexcache").mkdir()
    adapter = str(make_adapter(MODELS, 1))
    apart(check_not_waiting, adapter, str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
