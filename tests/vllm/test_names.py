"""What vLLM's requests and adapters are called, and which changes of weights ranks notice.

Stand-ins for vLLM's worker and runner have the shape that a CPU cannot show: a model within the
wrappers of CUDA graphs, an adapter that is fetched from the hub while it loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from flexcache.integration.checkpoint import identify_adapter
from flexcache.integration.file_digests import ANY_TIME, FileDigests
from flexcache.integration.vllm.weights import Names
from flexcache.integration.vllm.worker import RankWeights

# -- adapters of requests ------------------------------------------------------------------------


class Requests:
    """Requests of one engine, each with an adapter that is or will be loaded as a number."""

    def __init__(self, adapter: Path) -> None:
        self.names = Names(lambda: 0, can_lose_loads=True)
        self.adapter = adapter
        self.loaded: dict[int, str] = {}

    def serve(self, number: int = 1, num_on_gpu: int = 0, reloads: bool = False) -> bool:
        """Serve a request as vLLM does; return whether its KV may be stored."""
        adapter = LoRARequest("a", number, str(self.adapter), load_inplace=reloads)
        request: Any = SimpleNamespace(request_id="r", lora_request=adapter)
        name = self.names.begins(request, num_on_gpu)
        if reloads or number not in self.loaded:
            self.loaded = {**self.loaded, number: self.digest()}
            self.names.adapters_loaded(self.loaded)
        may_store = name.may_store
        self.names.ended(request)
        return may_store

    def unload(self, number: int) -> None:
        del self.loaded[number]

    def train(self, version: str) -> None:
        self.adapter.joinpath("adapter_model.safetensors").write_text(version)

    def digest(self) -> str:
        return identify_adapter(str(self.adapter), FileDigests(since_ns=ANY_TIME))


@pytest.fixture
def requests(tmp_path: Path) -> Requests:
    return Requests(make_files(tmp_path / "adapter", "v1"))


def make_files(path: Path, weights: str) -> Path:
    path.mkdir(parents=True)
    path.joinpath("adapter_config.json").write_text("{}")
    path.joinpath("adapter_model.safetensors").write_text(weights)
    return path


@pytest.mark.parametrize("way", ["loaded in place", "unloaded and loaded"])
def test_tokens_of_a_retrained_adapter_that_vllm_still_has_are_not_stored(
    way: str, requests: Requests
) -> None:
    assert requests.serve()
    assert requests.serve(num_on_gpu=288)
    requests.train("v2")
    in_place = way == "loaded in place"
    if not in_place:
        requests.unload(1)
    assert not requests.serve(1 if in_place else 2, num_on_gpu=288, reloads=in_place)
    assert requests.serve(1 if in_place else 2), "computed as a whole"
    requests.train("v1")
    assert not requests.serve(3, num_on_gpu=288), "vLLM has blocks of both by now"
    requests.names.gpu_reset()
    assert requests.serve(3)
    assert requests.serve(3, num_on_gpu=288)


def test_updates_in_place_each_with_a_reset_are_stored(requests: Requests) -> None:
    for version in ("v1", "v2", "v3"):
        requests.train(version)
        assert requests.serve(reloads=True)
        assert requests.serve(num_on_gpu=288)
        requests.names.gpu_reset()


# -- changes that ranks notice -------------------------------------------------------------------


class Model:
    def __init__(self, *parts: Model) -> None:
        self.loads = 0
        self.parts = parts

    def modules(self) -> Iterator[Model]:
        yield self
        for part in self.parts:
            yield from part.modules()

    def load_weights(self, weights: Any) -> None:
        self.loads += 1

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1


class Wrapper:
    """As vLLM's `CUDAGraphWrapper`: passes on what it has not itself."""

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)


class Runner:
    def __init__(self, model: Any) -> None:
        self.model = Wrapper(Wrapper(model))
        self._inner = model
        self.lora_manager: Any = None

    def get_model(self) -> Any:
        return self._inner


class Adapters:
    """As vLLM's manager of adapters."""

    def __init__(self) -> None:
        self.fetch: Callable[[], None] = lambda: None
        self.present: dict[int, Any] = {}

    def _load_adapter(self, request: Any) -> Any:
        self.fetch()
        self.present[request.lora_int_id] = request
        return request

    def list_adapters(self) -> Any:
        return self.present


class Worker:
    """As vLLM's worker, of which only the names of methods count."""

    def __init__(self) -> None:
        self.model = Model(Model(Model()))
        self.model_runner = Runner(self.model)
        self.changes = 0
        self.weights = RankWeights(self._changed)

    def _changed(self, *reason: Any) -> None:
        self.changes += 1

    def set_up(self) -> RankWeights:
        self.weights.attach()
        return self.weights

    def _does(self, *arguments: Any, **options: Any) -> None: ...

    reload_weights = update_weights = start_weight_update = finish_weight_update = _does
    sleep = load_model = reset_weights = _does


@pytest.mark.parametrize(
    "update",
    [
        lambda worker: worker.model_runner.model.load_weights([]),
        lambda worker: worker.model_runner.model.runnable.load_weights([]),
        lambda worker: worker.model_runner.model.runnable.runnable.load_weights([]),
        lambda worker: worker.model_runner.get_model().load_weights([]),
        lambda worker: worker.model_runner.get_model().load_state_dict({}),
    ],
)
def test_an_update_of_a_wrapped_model_is_noticed_once(update: Callable[[Worker], None]) -> None:
    worker = Worker()
    weights = worker.set_up()
    update(worker)
    assert (worker.changes, weights.num_updates, worker.model.loads) == (1, 1, 1)


def test_an_update_of_a_part_of_the_model_is_noticed_once() -> None:
    worker = Worker()
    worker.set_up()
    [layers] = worker.model.parts
    layers.load_weights([])
    layers.parts[0].load_state_dict({})
    assert worker.changes == 2


def test_weights_that_are_zeroed_are_noticed() -> None:
    worker = Worker()
    worker.set_up()
    worker.reset_weights()
    assert worker.changes == 1


def test_an_adapter_whose_next_commit_is_fetched_while_it_loads_is_not_named_by_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--adapter"
    main = repository / "refs" / "main"
    main.parent.mkdir(parents=True)
    commits = "a" * 40, "b" * 40
    first, second = (make_files(repository / "snapshots" / c, f"of {c}") for c in commits)
    shutil.move(second, tmp_path / "on the hub")
    main.write_text(commits[0])
    adapters = Adapters()
    worker = Worker()
    worker.model_runner.lora_manager = adapters
    weights = worker.set_up()
    digests = FileDigests(since_ns=ANY_TIME)
    former = identify_adapter(str(first), digests)
    adapters._load_adapter(LoRARequest("a", 1, "me/adapter"))
    assert weights.adapters == {1: former}

    def fetch() -> None:
        shutil.move(tmp_path / "on the hub", second)
        main.write_text(commits[1])

    adapters.fetch = fetch
    adapters._load_adapter(LoRARequest("b", 2, "me/adapter"))
    assert weights.adapters[2] != former
    adapters.fetch = lambda: None
    adapters._load_adapter(LoRARequest("c", 3, "me/adapter"))
    assert weights.adapters[3] == identify_adapter(str(second), digests)
