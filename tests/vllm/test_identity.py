"""Model ids: equal for engines whose KV is interchangeable, different for all others."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ENGINE_ENV
from paths import MODELS
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from flexcache.errors import ConfigError
from flexcache.integration.checkpoint import identify_adapter
from flexcache.integration.file_digests import ANY_TIME, FileDigests, digest
from flexcache.integration.vllm.engine import read_model_config
from flexcache.integration.vllm.weights import Names
from flexcache.integration.vllm.weights import read_model_id as read_id
from flexcache.integration.vllm.worker import RankWeights

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 1024,
}


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from make_models import make_model

    return make_model(MODELS, "tiny")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENGINE_ENV.items():
        monkeypatch.setenv(name, value)


def read_model_id(config: Any) -> str:
    return read_id(config, FileDigests(since_ns=ANY_TIME))


def model_id(model: Path, **settings: Any) -> str:
    """Return the id of a real engine's config."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"dtype": "bfloat16", "max_model_len": 2048, "block_size": 32}
    config = EngineArgs(model=str(model), **{**defaults, **settings}).create_engine_config()
    return read_model_id(config)


def stand_in(**model: Any) -> Any:
    """Make a config with only the fields that are read, for what no CPU engine supports."""
    text_config = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=4096,
    )
    defaults = {
        "model": "org/name", "revision": "abc", "code_revision": None, "trust_remote_code": False,
        "dtype": torch.bfloat16, "quantization": None, "hf_config": text_config,
        "hf_text_config": text_config, "hf_overrides": {}, "max_model_len": 2048, "seed": 0,
        "override_generation_config": {}, "enable_sleep_mode": False,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**defaults, **model}),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def copy_model(tiny: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(tiny, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def rest(identity: str) -> str:
    """Return everything but the model's name."""
    return identity.partition("|")[2]


@pytest.mark.newest
def test_an_id_begins_with_the_models_name_and_reads_well(tiny: Path) -> None:
    name, *parts = model_id(tiny).split("|")
    assert name == str(tiny)
    settings = dict(part.split("=") for part in parts)
    assert settings["dtype"] == settings["kv"] == "bfloat16"
    assert settings.keys() == {"checkpoint", "dtype", "kv", "positions"}


@pytest.mark.newest
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "bfloat16"},  # what "auto" comes to
        {"seed": 7, "max_num_seqs": 3, "gpu_memory_utilization": 0.5},
        {"max_model_len": 1024, "tensor_parallel_size": 1, "enforce_eager": True},
        {"served_model_name": "another", "load_format": "safetensors"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                "prompt_lookup_max": 3}},
    ],
    ids=lambda settings: ",".join(settings),
)  # fmt: skip
def test_settings_that_do_not_change_the_numbers_keep_the_id(
    tiny: Path, settings: dict[str, Any]
) -> None:
    assert model_id(tiny, **settings) == model_id(tiny)


@pytest.mark.newest
def test_each_setting_that_changes_the_numbers_makes_another_id(tiny: Path) -> None:
    def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}

    draft = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 2}
    ids = [
        model_id(tiny, **settings)
        for settings in (
            {},
            {"dtype": "float32"},
            {"kv_cache_dtype": "fp8"},
            {"load_format": "dummy"},
            {"load_format": "dummy", "seed": 7},
            {"hf_overrides": rope("default", rope_theta=50000.0)},
            {"hf_overrides": rope("yarn", factor=2.0, original_max_position_embeddings=2048)},
            {"hf_overrides": rope("yarn", factor=4.0, original_max_position_embeddings=2048)},
            {"hf_overrides": {"rms_norm_eps": 1e-3}},
            {"speculative_config": draft},
        )
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.newest
def test_a_model_with_two_position_ranges_is_identified_by_the_one_it_computes_for(
    tiny: Path,
) -> None:
    ids = {
        length: model_id(tiny, hf_overrides={"rope_parameters": LONGROPE}, max_model_len=length)
        for length in (512, 1024, 1025, 2048)
    }
    assert ids[512] == ids[1024] != ids[1025] == ids[2048]


@pytest.mark.newest
def test_llama_4_tunes_attention_for_long_contexts_only() -> None:
    def llama4(length: int, **settings: Any) -> str:
        config = SimpleNamespace(model_type="llama4", rope_parameters=None)
        return read_model_id(
            stand_in(hf_config=config, hf_text_config=config, max_model_len=length, **settings)
        )

    assert llama4(8192) == llama4(32768) != llama4(32769) == llama4(65536)
    forced = {"override_generation_config": {"attn_temperature_tuning": True}}
    assert llama4(8192, **forced) == llama4(65536)


@pytest.mark.newest
def test_an_override_function_is_identified_by_the_config_it_produces(tiny: Path) -> None:
    def with_theta(theta: float) -> Any:
        def override(config: Any) -> Any:
            config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
            return config

        return override

    first = model_id(tiny, hf_overrides=with_theta(20000.0))
    assert first == model_id(tiny, hf_overrides=with_theta(20000.0))
    assert first != model_id(tiny, hf_overrides=with_theta(30000.0))
    assert first != model_id(tiny)


@pytest.mark.newest
def test_a_checkpoint_is_identified_by_its_content_wherever_it_is(
    tiny: Path, tmp_path: Path
) -> None:
    copied = copy_model(tiny, tmp_path / "copied", transformers_version="4.99", torch_dtype="auto")
    assert rest(model_id(copied)) == rest(model_id(tiny))

    edited = copy_model(tiny, tmp_path / "edited", rms_norm_eps=0.5)
    assert rest(model_id(edited)) != rest(model_id(tiny))

    before = model_id(copied)
    weights = copied / "model.safetensors"
    trained = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(trained, weights, metadata={"format": "pt"})
    assert model_id(copied) != before


@pytest.mark.newest
def test_a_hub_name_is_identified_by_the_fetched_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"

    def fetch(commit: str) -> None:
        (repository / "snapshots" / commit).mkdir(parents=True)
        blob = repository / "blobs" / hashlib.sha1(b"blob 2\0{}").hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_text("{}")
        (repository / "snapshots" / commit / "config.json").symlink_to(blob)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)

    commits = "1" * 40, "2" * 40
    ids = []
    snapshots = repository / "snapshots"
    for commit in commits:
        fetch(commit)
        ids.append(read_model_id(stand_in(revision=None)))
        assert ids[-1] == read_model_id(stand_in(revision="main"))
        assert ids[-1] == read_model_id(stand_in(revision=commit))
        assert ids[-1] == read_model_id(stand_in(revision=None, model=str(snapshots / commit)))
        # As releases called it that looked at no file of a snapshot: what they stored is found.
        numbers = "dtype=bfloat16|positions=34f21c7ca614f825|kv=bfloat16"
        assert ids[-1] == f"org/name|revision={commit}|{numbers}"
    assert ids[0] != ids[1]
    config = stand_in(revision=None)
    draft = stand_in(model=str(snapshots / commits[0]), revision=None).model_config
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    assert read_model_id(config) == f"{ids[1]}|draft=eagle:e37ffb1cb207c03e"
    assert "|revision=v2|" in read_model_id(stand_in(revision="v2", model="org/never-fetched"))


@pytest.mark.newest
def test_the_same_model_quantised_differently_has_another_id() -> None:
    def quantised(method: str | None, checkpoint: Any, by_user: Any = None) -> str:
        config = SimpleNamespace(rope_parameters=None, quantization_config=checkpoint)
        return read_model_id(
            stand_in(quantization=method, quantization_config=by_user, hf_config=config)
        )

    ids = [
        quantised(None, None),
        quantised("fp8", None),
        quantised("fp8", None, {"linear": {"weight": "fp8_e5m2"}}),
        quantised("gptq", {"bits": 4, "group_size": 128}),
        quantised("gptq", {"bits": 4, "group_size": 64}),
        quantised("awq", {"bits": 4, "group_size": 128}),
    ]
    assert len(set(ids)) == len(ids)
    assert quantised("gptq", {"group_size": 128, "bits": 4.0, "new": None}) == ids[3]


@pytest.mark.newest
def test_layers_left_out_of_kv_quantisation_and_code_revisions_are_in_the_id() -> None:
    ids = [read_model_id(stand_in())]
    config = stand_in()
    config.cache_config = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=[])
    ids.append(read_model_id(config))
    config.cache_config.kv_cache_dtype_skip_layers = ["3", "5"]
    ids.append(read_model_id(config))
    ids.append(read_model_id(stand_in(trust_remote_code=True, code_revision="one")))
    ids.append(read_model_id(stand_in(trust_remote_code=True, code_revision="two")))
    images = SimpleNamespace(mm_processor_kwargs={"max_pixels": 1000})
    ids.append(read_model_id(stand_in(multimodal_config=images)))
    assert len(set(ids)) == len(ids)
    assert read_model_id(stand_in(code_revision="one")) == ids[0]


@pytest.mark.newest
def test_drafts_of_equal_shape_are_told_apart_by_method_and_model() -> None:
    def with_draft(method: str, **draft: Any) -> str:
        config = stand_in()
        config.speculative_config = SimpleNamespace(
            method=method, draft_model_config=stand_in(**draft).model_config
        )
        return read_model_id(config)

    ids = [
        read_model_id(stand_in()),
        with_draft("eagle", model="org/draft"),
        with_draft("eagle3", model="org/draft"),
        with_draft("eagle", model="org/other"),
        with_draft("eagle", model="org/draft", revision="other"),
        with_draft("eagle", model="org/draft", quantization="fp8"),
        with_draft("mtp"),
    ]
    assert len(set(ids)) == len(ids)
    assert with_draft("ngram") == with_draft("suffix") == ids[0]


@pytest.mark.newest
def test_a_model_fetched_from_an_object_store_has_the_name_it_was_asked_for_by() -> None:
    fetched = stand_in(
        model="/home/user/.cache/vllm/model_streamer/1a2b", model_weights="s3://b/model"
    )
    assert read_model_id(fetched).startswith("s3://b/model|")


@pytest.mark.newest
def test_scales_that_an_engine_computes_for_itself_are_refused() -> None:
    config = stand_in()
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        read_model_id(config)


@pytest.mark.newest
def test_what_needs_vllm_033_is_refused_by_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from flexcache.integration.vllm import FlexCacheConnectorV1

    sleeps = stand_in(enable_sleep_mode=True)
    assert FlexCacheConnectorV1.supports_sleep_mode(sleeps) is True
    routes = stand_in()
    routes.aux_output_config = SimpleNamespace(enable_return_routed_experts=True)
    routes_028 = stand_in(enable_return_routed_experts=True)
    for config, name in (
        (sleeps, "enable_sleep_mode"),
        (routes, "experts"),
        (routes_028, "experts"),
    ):
        monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
        with pytest.raises(ConfigError, match=rf"{name}.*vLLM 0\.33"):
            read_model_config(config, SimpleNamespace())
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", None, raising=False)
        with pytest.raises(AttributeError):  # it goes on
            read_model_config(config, SimpleNamespace())


@pytest.mark.newest
def test_hashes_of_more_than_a_block_are_refused_and_vllm_makes_none_beside_a_connector() -> None:
    config = stand_in()
    config.num_hash_lookahead_tokens = 1
    with pytest.raises(ConfigError, match="disable_lookahead_block_hashes"):
        read_model_config(config, SimpleNamespace())
    count = getattr(VllmConfig, "num_hash_lookahead_tokens", None)
    if count is None:
        return  # before 0.33
    config.speculative_config = SimpleNamespace(
        use_eagle_block_drop=lambda: True, disable_lookahead_block_hashes=False
    )
    config.cache_config.enable_prefix_caching = True
    config.num_prefill_lookahead_tokens, config.kv_transfer_config = 1, None
    assert count.fget(config) == 1
    config.kv_transfer_config = object()
    assert count.fget(config) == 0


@pytest.mark.newest
def test_equal_values_have_equal_digests_however_they_are_spelled() -> None:
    assert digest({"a": 1, "b": [2.0, None]}) == digest({"b": (2, None), "a": 1.0, "c": None})
    assert digest({torch.float16, torch.bfloat16}) == digest({torch.bfloat16, torch.float16})
    with pytest.raises(ConfigError, match="cannot be identified"):
        digest({"a": object()})


# -- names of requests, and changes of weights that ranks notice -----------------------------------


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
