"""The router finds the blocks of vLLM's own block pool by their tokens, and by no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from flexcache.events.wire import decode_batch
from flexcache.router.events import EventApplier
from flexcache.router.holdings import find
from flexcache.router.index import KVIndexer

BLOCK = 16
PROMPT = list(range(1000, 1000 + 6 * BLOCK))
IMAGE_AT = 2 * BLOCK + 5


class Engine:
    """A block pool that publishes its events."""

    def __init__(self, layout: str) -> None:
        init_none_hash(sha256)
        self._pool = BlockPool(100, True, BLOCK, enable_kv_cache_events=True)
        self._layout = layout
        self.applier = EventApplier(KVIndexer())

    def store(self, *, cut: int = 6, **content: Any) -> list[Any]:
        """Cache a prompt, its first ``cut`` blocks in a step of their own; returns its blocks."""
        request = Request(
            "request", PROMPT, SamplingParams(max_tokens=1), None,
            block_hasher=get_request_block_hasher(BLOCK, sha256), **content,
        )  # fmt: skip
        blocks = self._pool.get_new_blocks(6)
        for start, stop in ((0, cut), (cut, 6)):
            if start < stop:
                self._pool.cache_full_blocks(request, blocks, start, stop, BLOCK, 0)
        self._publish()
        return blocks

    def evict(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)
        self._publish()

    def clear(self) -> None:
        self._pool.free_blocks(block for block in self._pool.blocks[1:] if block.ref_cnt)
        assert self._pool.reset_prefix_cache()
        self._publish()

    def _publish(self) -> None:
        events = self._pool.take_events()
        for event in events:
            if hasattr(event, "kv_cache_spec_kind"):
                event.kv_cache_spec_kind = "full_attention"
        payload = msgspec.msgpack.encode(KVEventBatch(1.0, events, 0))
        if self._layout == "array":  # as up to 0.23
            rows = [
                [type(event).__name__, *msgspec.structs.astuple(event)[:11]] for event in events
            ]
            payload = msgspec.msgpack.encode([1.0, rows, 0])
        self.applier.apply("vllm", decode_batch(payload))
        self.applier.check()

    def depth(self, **prompt: Any) -> int:
        """Return how many blocks of the prompt are found."""
        forms = self.applier.forms
        return int(find(self.applier.index, forms, PROMPT, **prompt).tokens.max()) // BLOCK


@pytest.fixture(params=["map", "array"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def image(name: str) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=IMAGE_AT, length=BLOCK),
        )
    ]


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, 1, "/nowhere")


@pytest.mark.parametrize("cut", [1, 4, 6])
@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ({}, {}),
        ({"cache_salt": "pepper"}, {"salt": "pepper"}),
        ({"lora_request": adapter("tuned")}, {"adapter": "tuned"}),
        (
            {"lora_request": adapter("tuned"), "cache_salt": "pepper"},
            {"adapter": "tuned", "salt": "pepper"},
        ),
    ],
    ids=["plain", "salt", "adapter", "both"],
)
def test_blocks_are_found_by_their_own_prompts_only(
    engine: Engine, cut: int, stored: dict[str, Any], found: dict[str, Any]
) -> None:
    engine.store(cut=cut, **stored)
    prompts: list[dict[str, Any]] = [
        {}, {"salt": "pepper"}, {"salt": "tuned"}, {"adapter": "tuned"}, {"adapter": "pepper"},
        {"adapter": "tuned", "salt": "pepper"}, {"adapter": "tuned", "salt": "tuned"},
    ]  # fmt: skip
    assert {str(prompt): engine.depth(**prompt) for prompt in prompts} == {
        str(prompt): 6 * (prompt == found) for prompt in prompts
    }


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6])
def test_an_image_is_matched_up_to_its_first_block(engine: Engine, cut: int) -> None:
    engine.store(cut=cut, mm_features=image("a picture"))
    assert engine.depth() == 2
    assert engine.depth(salt="a picture") == 0
    num_blocks = engine.applier.index.num_blocks
    engine.store(cut=cut, mm_features=image("another"))
    assert engine.applier.index.num_blocks == num_blocks + 4, "the blocks from the image on differ"
    engine.store(cut=cut)
    assert engine.depth() == 6


def test_evicted_and_cleared_blocks_are_gone(engine: Engine) -> None:
    blocks = engine.store()
    engine.evict(blocks[4:])
    assert engine.depth() == 4
    engine.clear()
    assert engine.depth() == 0
