"""Weights and adapters that change: what was computed with others is not found.

Each test compares with the tokens of an engine with the new weights and an empty cache, and with
those of the old weights: what they have in common would show nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import second_runner
import torch
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from make_models import make_adapter, make_model
from paths import MODELS
from safetensors.torch import load_file, save_file
from stores import PATIENT, store_at
from test_restart import until_it_stores

pytestmark = pytest.mark.newest
PROMPT = make_prompt(300, 1)
CACHED = 288  # whole blocks of 32
SHARED = [make_prompt(300, seed) for seed in range(10, 15)]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model: before and after an update of one layer's k_proj."""
    tiny, target = make_model(MODELS, "tiny"), tmp_path_factory.mktemp("checkpoints")
    for name in ("before", "after"):
        shutil.copytree(tiny, target / name)
    train(target / "after")
    return target / "before", target / "after"


def train(checkpoint: Path) -> None:
    """Change the weights of one projection in place."""
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    torch.manual_seed(5)
    weights[name] = weights[name] + torch.randn_like(weights[name]) * 0.2
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture
def sockets() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="fc-")
    yield Path(path)
    shutil.rmtree(path)


def start(
    directory: Path, model: Path, more: dict[str, Any] | None = None, system: str = "FlexCache",
    **engine: Any,
) -> Any:  # fmt: skip
    """Start an engine that computes with 32 bits: other steps then give equal tokens."""
    common = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 32 << 20, "seed": 0,
        "model": str(model),
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    settings = Settings(
        system, "tiny", None, dram_gb=None, engine={**common, **engine}, num_threads=1,
        more={"skip_slow_loads": False, **(more or {"cpu_cache_gb": 0.1})},
    )  # fmt: skip
    return DrivenEngine(settings, directory / "log")


def on_ssd(directory: Path) -> dict[str, Any]:
    return {"cpu_cache_gb": 0.1, "ssd_cache_gb": 0.2, "ssd_cache_dirs": [str(directory / "ssd")]}


def answers_of(tmp_path: Path, model: Path, adapter: Path | None = None) -> list[int]:
    """What an engine that has cached nothing answers."""
    return computed(tmp_path, model, (PROMPT, adapter))[0]


def computed(tmp_path: Path, model: Path, *asked: tuple[list[int], Path | None]) -> list[list[int]]:
    """What an engine without a cache answers to prompts, each with an adapter or none."""
    lora = LORA if any(adapter for _, adapter in asked) else {}
    with running(start(tmp_path / "fresh", model, system="alone", **lora)) as engine:
        answers = [engine.generate(p, adapter=adapter and str(adapter)) for p, adapter in asked]
    assert not any(cached for _, cached in answers)
    return [tokens for tokens, _ in answers]


@pytest.mark.parametrize(
    "way", ["reload_weights", pytest.param("load_weights", marks=pytest.mark.whole)]
)
def test_after_an_update_and_a_reset_of_vllms_cache_alone_nothing_old_is_found(
    way: str, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = checkpoints
    expected = answers_of(tmp_path, after)
    with running(start(tmp_path, before)) as engine:
        old, _ = engine.generate(PROMPT)
        assert old != expected
        engine.settle()
        engine.update(str(after), way)
        engine.forget("GPU")
        assert engine.generate(PROMPT) == (expected, 0)
        engine.settle()
        engine.forget("GPU")
        assert engine.generate(PROMPT) == (expected, CACHED)  # and goes on caching


def test_between_an_update_and_a_reset_nothing_of_two_weights_is_stored(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = checkpoints
    expected = answers_of(tmp_path, after)
    with running(start(tmp_path, before)) as engine:
        engine.generate(PROMPT)
        engine.settle()
        engine.update(str(after))
        engine.generate(PROMPT)  # vLLM has its blocks, of the old weights
        engine.generate(PROMPT + make_prompt(200, 2))
        engine.settle()
        engine.forget("GPU")
        assert engine.generate(PROMPT) == (expected, 0)


@pytest.mark.whole
def test_engines_of_one_server_that_are_updated_one_by_one_do_not_mix(
    checkpoints: tuple[Path, Path], tmp_path: Path, sockets: Path
) -> None:
    before, after = checkpoints
    shared = {"endpoint": f"ipc://{sockets}/cache", "num_cpu_blocks": 256}
    with (
        running(start(tmp_path / "a", before, shared)) as a,
        running(start(tmp_path / "b", before, shared)) as b,
    ):
        old, _ = a.generate(PROMPT)
        settle(a)
        a.update(str(after))
        a.reset()
        new, cached = a.generate(PROMPT)
        assert cached == 0
        assert new != old
        settle(a)
        assert b.generate(PROMPT)[0] == old  # not the blocks that A has stored since
        other = make_prompt(300, 3)
        old_other, _ = b.generate(other)
        settle(b)
        new_other, cached = a.generate(other)  # nor A those of B
        assert cached == 0
        assert new_other != old_other


def settle(engine: DrivenEngine) -> None:
    """Have another request's steps report the end of what is stored."""
    for seed in range(40, 43):
        engine.generate(make_prompt(40, seed))


def test_a_restart_finds_what_the_weights_of_the_start_have_stored_and_nothing_else(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = checkpoints
    model = tmp_path / "model"
    shutil.copytree(before, model)
    with running(start(tmp_path, model, on_ssd(tmp_path))) as engine:
        old, _ = engine.generate(PROMPT)
        engine.settle()
        engine.update(str(after))
        engine.forget("GPU")
        late = make_prompt(300, 4)
        new_late, _ = engine.generate(late)
        engine.settle()
    with running(start(tmp_path, model, on_ssd(tmp_path))) as engine:
        assert engine.generate(PROMPT) == (old, CACHED)
        tokens, cached = engine.generate(late)
        assert cached == 0
        assert tokens != new_late


@pytest.mark.whole
def test_a_checkpoint_tuned_in_part_is_another(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = checkpoints
    model = tmp_path / "model"
    shutil.copytree(before, model)
    expected = answers_of(tmp_path, after)
    with running(start(tmp_path, model, on_ssd(tmp_path))) as engine:
        engine.generate(PROMPT)
        engine.settle()
    train(model)
    with running(start(tmp_path, model, on_ssd(tmp_path))) as engine:
        assert engine.generate(PROMPT) == (expected, 0)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    shutil.copytree(make_adapter(MODELS, 1), tmp_path / "adapter")
    return tmp_path / "adapter"


def retrain(adapter: Path, number: int = 2) -> None:
    shutil.copy(make_adapter(MODELS, number) / "adapter_model.safetensors", adapter)


@pytest.mark.whole
def test_an_adapter_retrained_in_place_is_another_after_a_restart(
    adapter: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    model = checkpoints[0]
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        old, _ = engine.generate(PROMPT, adapter=str(adapter))
        engine.settle()
    retrain(adapter)
    expected = answers_of(tmp_path, model, adapter)
    assert expected != old
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        assert engine.generate(PROMPT, adapter=str(adapter)) == (expected, 0)


def test_an_adapter_loaded_again_in_place_is_another(
    adapter: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    with running(start(tmp_path, checkpoints[0], **LORA)) as engine:
        old, _ = engine.generate(PROMPT, adapter=str(adapter))
        engine.settle()
        retrain(adapter)
        engine.forget("GPU")
        # vLLM has the old one in memory: it is still what answers, and what is found.
        assert engine.generate(PROMPT, adapter=str(adapter)) == (old, CACHED)
        engine.settle()
        engine.forget("GPU")
        new, cached = engine.generate(PROMPT, adapter=str(adapter), reloads=True)
        assert cached == 0
        engine.settle()
        engine.forget("GPU")
        assert engine.generate(PROMPT, adapter=str(adapter)) == (new, CACHED)
        engine.settle()
        engine.forget("GPU")
        moved = shutil.copytree(adapter, tmp_path / "elsewhere")
        tokens, _ = engine.generate(PROMPT, adapter=str(moved))  # not loaded under this name yet
        assert tokens == new
        engine.settle()
        engine.forget("GPU")
        assert engine.generate(PROMPT, adapter=str(moved)) == (new, CACHED)
    assert new == answers_of(tmp_path, checkpoints[0], adapter) != old


@pytest.mark.whole
@pytest.mark.runners
def test_an_adapter_retrained_between_the_match_and_the_load_is_another(
    adapter: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """vLLM reads the files when it runs the request, after its KV was found. Only its first runner
    can compute that again then; elsewhere nothing is loaded before the adapter is."""
    model = checkpoints[0]
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        old, _ = engine.generate(PROMPT, adapter=str(adapter))
        engine.settle()
    retrained = make_adapter(MODELS, 2) / "adapter_model.safetensors"
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        engine.copy_after_match(retrained, adapter / retrained.name)
        answers = [engine.generate(PROMPT, adapter=str(adapter))[0] for _ in range(2)]
        engine.settle()
        engine.forget("GPU")
        answers.append(engine.generate(PROMPT, adapter=str(adapter))[0])
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    expected = answers_of(tmp_path, model, adapter)
    assert answers == [expected] * 3
    assert expected != old


@pytest.mark.whole
def test_what_vllm_still_has_of_a_retrained_adapter_is_not_stored_as_the_new_ones(
    adapter: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    with running(start(tmp_path, checkpoints[0], **LORA)) as engine:
        engine.generate(PROMPT, adapter=str(adapter))
        retrain(adapter)
        engine.generate(make_prompt(300, 5), adapter=str(adapter), reloads=True)
        _, cached = engine.generate(PROMPT, adapter=str(adapter))
        assert cached == CACHED  # of the former: vLLM tells adapters apart by name and path only
        engine.settle()
        engine.forget("GPU")
        tokens = engine.generate(PROMPT, adapter=str(adapter))
    assert tokens == (answers_of(tmp_path, checkpoints[0], adapter), 0)


@pytest.mark.whole
def test_an_adapter_is_found_at_another_path_after_a_restart(
    adapter: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    model = checkpoints[0]
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        tokens, _ = engine.generate(PROMPT, adapter=str(adapter))
        engine.settle()
    moved = shutil.copytree(adapter, tmp_path / "elsewhere")
    with running(start(tmp_path, model, on_ssd(tmp_path), **LORA)) as engine:
        recovers = second_runner.is_first() and not second_runner.schedules_ahead()
        first = engine.generate(PROMPT, adapter=str(moved))
        assert first == (tokens, CACHED if recovers else 0)  # the adapter is not loaded before
        engine.settle()
        engine.forget("GPU")
        assert engine.generate(PROMPT, adapter=str(moved)) == (tokens, CACHED)


@pytest.mark.whole
def test_requests_that_run_across_an_update_leave_nothing_of_two_weights(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = checkpoints
    # The last one is computed in steps: the update comes between them.
    prompts = [make_prompt(100 + 20 * number, 60 + number) for number in range(7)]
    prompts.append(make_prompt(1500, 67))
    whole = [len(prompt) // 32 * 32 for prompt in prompts]
    steps = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    old, new = (computed(tmp_path, m, *((p, None) for p in prompts)) for m in checkpoints)
    assert all(a != b for a, b in zip(old, new, strict=True))
    with running(start(tmp_path, before, on_ssd(tmp_path), **steps)) as engine:
        answers = engine.answers(prompts, 40, updated=str(after))
        assert [len(answers[position]) for position in range(8)] == [40] * 8
        engine.new_weights("v2")
        engine.forget("GPU")
        assert [engine.generate(p) for p in prompts] == [(tokens, 0) for tokens in new]
        engine.forget("DRAM")
        found = [engine.generate(prompt) for prompt in prompts]
        assert found == list(zip(new, whole, strict=True))
        assert engine.stats()["hit_blocks"]["SSD"] >= sum(whole) // 32
    with running(start(tmp_path, before, on_ssd(tmp_path), **steps)) as engine:
        assert [engine.generate(prompt)[0] for prompt in prompts] == old
        engine.update(str(after))
        engine.new_weights("v2")
        engine.forget("GPU")
        found = [engine.generate(prompt) for prompt in prompts]
        assert found == list(zip(new, whole, strict=True))


@pytest.mark.whole
def test_recording_on_ssd_goes_on_after_a_reset(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    with running(start(tmp_path, checkpoints[0], on_ssd(tmp_path))) as engine:
        expected, _ = engine.generate(PROMPT)
        engine.reset()
        engine.new_weights("v1")
        assert engine.generate(PROMPT) == (expected, 0)
        engine.settle()
    with running(start(tmp_path, checkpoints[0], on_ssd(tmp_path))) as engine:
        engine.new_weights("v1")
        assert engine.generate(PROMPT) == (expected, CACHED)


class AtStore:
    """An engine with a cache of its own above a store that others use, too."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.engine = engine

    def put(self, prompt: list[int], expected: list[int], **adapter: Any) -> None:
        """Have a prompt computed whole and stored."""
        assert self.engine.generate(prompt, **adapter) == (expected, 0)
        self.engine.settle()

    def get(self, prompt: list[int], expected: list[int], **adapter: Any) -> None:
        """Have a prompt loaded from the store."""
        self.engine.forget("DRAM")
        before = self.engine.stats()["hit_blocks"].get("REMOTE", 0)
        answer, stats = self.engine.generate(prompt, **adapter), self.engine.stats()
        assert answer == (expected, CACHED), stats["remote"]
        assert stats["hit_blocks"]["REMOTE"] - before == CACHED // 32

    def load(self, adapter: str) -> None:
        """Have the ranks load an adapter: nothing is found for the request that makes them."""
        self.engine.generate(make_prompt(40, 98), adapter=adapter)

    def update(self, checkpoint: Path, version: str | None = None) -> None:
        self.engine.update(str(checkpoint))
        if version is not None:
            self.engine.new_weights(version)
        self.engine.forget("GPU")


@contextmanager
def at_store(directory: Path, model: Path, url: str) -> Iterator[AtStore]:
    more = {"num_cpu_blocks": 256, "remote_url": url, **PATIENT}
    with running(start(directory, model, more, **LORA)) as engine:
        until_it_stores(engine, first_seed=100)
        yield AtStore(engine)


@pytest.fixture(scope="module")
def computed_by_both(
    checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """What engines without a cache answer to `SHARED`: the old weights, the new ones, and to
    `PROMPT` the old ones with three adapters."""
    directory, (before, after) = tmp_path_factory.mktemp("computed"), checkpoints
    asked = [(prompt, None) for prompt in SHARED]
    adapters = [(PROMPT, make_adapter(MODELS, number)) for number in (1, 2, 3)]
    both = computed(directory, before, *asked, *adapters)
    old, new, tuned = both[: len(asked)], computed(directory, after, *asked), both[len(asked) :]
    assert all(a != b for a, b in zip(old, new, strict=True))
    assert len({tuple(tokens) for tokens in (*tuned, old[0])}) == 4
    return old, new, tuned


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["file", "mooncake"])
def test_what_engines_find_in_a_store_is_of_their_weights(
    kind: str,
    checkpoints: tuple[Path, Path],
    adapter: Path,
    computed_by_both: tuple[list[list[int]], list[list[int]], list[list[int]]],
    tmp_path: Path,
) -> None:
    before, after = checkpoints
    old, new, tuned = computed_by_both
    model = tmp_path / "model"
    shutil.copytree(before, model)
    moved, ours = shutil.copytree(adapter, tmp_path / "elsewhere"), str(adapter)
    theirs = str(moved)
    with store_at(kind, tmp_path) as url:
        with at_store(tmp_path / "a", model, url) as a, at_store(tmp_path / "b", model, url) as b:
            # Weights and adapters of the start.
            a.put(SHARED[0], old[0])
            b.get(SHARED[0], old[0])
            a.put(PROMPT, tuned[0], adapter=ours)
            b.load(theirs)
            b.get(PROMPT, tuned[0], adapter=theirs)
            # An adapter that is trained again, and loaded again.
            retrain(adapter)
            a.engine.forget("GPU")
            a.put(PROMPT, tuned[1], adapter=ours, reloads=True)
            a.get(PROMPT, tuned[1], adapter=ours)
            b.get(PROMPT, tuned[0], adapter=theirs)
            b.load(ours)
            b.get(PROMPT, tuned[1], adapter=ours)
            # A is updated, B not yet; without a name, and then with one.
            a.update(after)
            a.put(SHARED[0], new[0])
            a.get(SHARED[0], new[0])
            b.get(SHARED[0], old[0])
            b.put(SHARED[1], old[1])
            a.put(SHARED[1], new[1])
            a.update(after, "v2")
            a.put(SHARED[2], new[2])
            b.put(SHARED[2], old[2])
            # Both are, and say so.
            b.update(after, "v2")
            b.get(SHARED[2], new[2])
            b.put(SHARED[3], new[3])
            a.get(SHARED[3], new[3])
            # Both are, and do not say to what; then a reset.
            a.update(after)
            b.update(after)
            a.put(SHARED[4], new[4])
            b.put(SHARED[4], new[4])
            a.get(SHARED[4], new[4])
            b.engine.reset()
            b.put(SHARED[4], new[4])
            b.get(SHARED[4], new[4])
        retrain(adapter, 3)
        with at_store(tmp_path / "a", model, url) as a:
            a.get(SHARED[0], old[0])
            a.put(SHARED[3], old[3])
            a.put(PROMPT, tuned[2], adapter=ours)
            a.load(theirs)
            a.get(PROMPT, tuned[0], adapter=theirs)
            a.update(after, "v2")
            a.get(SHARED[3], new[3])
        train(model)
        with at_store(tmp_path / "a", model, url) as a:
            for position in range(5):
                a.put(SHARED[position], new[position])
            assert a.engine.generate(PROMPT, adapter=theirs)[1] == 0
