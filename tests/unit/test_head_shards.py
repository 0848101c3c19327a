"""Shards of some heads each: the same bytes for any number of ranks that they are divided over.

The model to compare with is plain numpy: ``[layer, block, head, token, content]`` of a whole model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_device_worker import run_dry

from flexcache.client.lent_tensors import LentTensors, join_signatures
from flexcache.config.model import KVGroup, ModelConfig
from flexcache.errors import ConfigError, UnsupportedLayoutError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import HeadShards, describe_kv_caches
from flexcache.storage.pieces import align_up
from flexcache.storage.shards import ShardLayouts, Shards, shards_of_block
from flexcache.transfer.copier import PIECE_RUNS
from flexcache.transfer.cpu_copier import CpuCopier
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done, Execute, name_blocks, pack_ids
from flexcache.transfer.op_copies import OpAddresses

Bytes = npt.NDArray[np.uint8]
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""vLLM's: layers, blocks, heads, tokens, content of a token of a head."""
NUM_BLOCKS = 6
HOST_BLOCKS = 3


@dataclass(frozen=True)
class Case:
    """A model, and how its ranks hold it.

    Attributes:
        layers: Number of layers of each group.
        per_unit: Blocks in each unit of the host pool.
    """

    order: str
    layers: Sequence[int]
    num_heads: int
    tokens: int
    content: int
    per_unit: int
    num_shards: int

    def data(self, seed: int) -> list[Bytes]:
        random = np.random.default_rng(seed)
        shape = (NUM_BLOCKS, self.num_heads, self.tokens, self.content)
        return [random.integers(0, 256, (count, *shape), np.uint8) for count in self.layers]

    @property
    def room(self) -> int:
        """Bytes of a block in a shard: those of the largest group."""
        heads = self.num_heads // self.num_shards
        return max(self.layers) * heads * self.tokens * self.content

    def expected(self, data: list[Bytes], unit: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the shards of a unit of these blocks, each a group and a number."""
        heads = self.num_heads // self.num_shards
        shards = []
        for shard in range(self.num_shards):
            parts = []
            for group, block in unit:
                part = data[group][:, block, shard * heads : (shard + 1) * heads]
                if self.order == "BHLNC":  # as it is in the engine's memory, in one piece
                    part = part.transpose(1, 0, 2, 3)
                elif "NH" in self.order:
                    part = part.transpose(0, 2, 1, 3)
                parts.append(part.tobytes().ljust(self.room, b"\0"))
            shards.append(b"".join(parts))
        return shards


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_shards = draw(st.sampled_from([1, 2, 4]))
    heads = num_shards * draw(st.integers(1, 3))
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return Case(
        draw(st.sampled_from(ORDERS)), layers, heads, draw(st.integers(2, 5)),
        draw(st.sampled_from([1, 8, 24])), draw(st.integers(1, 2)), num_shards,
    )  # fmt: skip


def held(case: Case, data: list[Bytes], tp_size: int, rank: int) -> tuple[Any, list[list[str]]]:
    """Return a rank's tensors, ``[block, head, token, content]``, in the engine's order."""
    heads = case.num_heads // tp_size
    tensors, groups = {}, []
    for group, whole in enumerate(data):
        part = whole[:, :, rank * heads : (rank + 1) * heads]
        memory = np.ascontiguousarray(part.transpose(["LBHNC".index(dim) for dim in case.order]))
        views = torch.from_numpy(memory).permute([case.order.index(dim) for dim in "LBHNC"])
        names = [f"{group}.{layer}" for layer in range(len(whole))]
        tensors.update(zip(names, views.unbind(0), strict=True))
        groups.append(names)
    return tensors, groups


@contextmanager
def ranks_of(
    case: Case, data: list[Bytes], tp_size: int
) -> Iterator[tuple[list[DeviceWorker], list[HostSegment], list[Any], str]]:
    """Run the ranks of an engine; their workers, host memory and tensors, and their layout."""
    per_rank = case.num_shards // tp_size
    size = case.per_unit * case.room
    with ExitStack() as stack:
        workers, segments, kv, signatures = [], [], [], set()
        for rank in range(tp_size):
            tensors, groups = held(case, data, tp_size, rank)
            segment = stack.enter_context(
                HostSegment.create(per_rank * (size if per_rank == 1 else align_up(size)),
                                   HOST_BLOCKS)
            )  # fmt: skip
            segment.map()
            lent = LentTensors(tensors, 0, "", [NUM_BLOCKS] * len(groups), groups, head_dim=1)
            layouts = lent.layouts(
                per_rank * case.room, len(groups), per_rank, segment.stride // per_rank
            )
            signatures.add(join_signatures(layouts))
            worker = DeviceWorker(
                layouts, segment, CpuCopier(), blocks_per_unit=case.per_unit, may_skip=True
            )
            stack.callback(worker.close)
            workers.append(worker)
            segments.append(segment)
            kv.append(tensors)
        [signature] = signatures
        yield workers, segments, kv, signature


def move(worker: DeviceWorker, kind: OpKind, gpu: Sequence[tuple[int, int]], host: int) -> None:
    named = np.array([int(name_blocks(group, np.array([n]))[0]) for group, n in gpu], np.int64)
    ends = [pack_ids(named), pack_ids(np.array([host], np.int64))]
    src, dst = ends if kind is OpKind.D2H else ends[::-1]
    worker.execute(Execute(1, kind, src, dst, 1))
    assert run_dry(worker) == [Done(1, 1)]


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_the_shards_of_a_block_are_the_same_for_any_number_of_ranks(
    case: Case, draw: st.DataObject
) -> None:
    data = case.data(1)
    blocks = st.tuples(st.integers(0, len(case.layers) - 1), st.integers(0, NUM_BLOCKS - 1))
    unit = draw.draw(st.lists(
        blocks, min_size=case.per_unit, max_size=case.per_unit, unique_by=lambda each: each[1]
    ))  # fmt: skip
    expected = case.expected(data, unit)
    sizes = [case.per_unit * case.room] * case.num_shards
    found, layouts = [], set()
    for tp_size in [count for count in (1, 2, 4) if case.num_shards % count == 0]:
        with ranks_of(case, data, tp_size) as (workers, segments, kv, signature):
            for worker in workers:
                move(worker, OpKind.D2H, unit, 1)
            stored = [bytes(shard) for shard in shards_of_block(segments, sizes, 1)]
            found.append(stored)
            layouts.add(signature)
            for tensors in kv:
                for tensor in tensors.values():
                    tensor.zero_()
            per_rank = case.num_shards // tp_size
            for number, shard in enumerate(expected):
                segment = segments[number // per_rank]
                start = number % per_rank * (segment.stride // per_rank)
                segment.block(2)[start : start + sizes[0]] = shard
            for worker in workers:
                move(worker, OpKind.H2D, unit, 2)
            for rank, tensors in enumerate(kv):
                before, _ = held(case, data, tp_size, rank)
                for group, block in unit:
                    for name, tensor in tensors.items():
                        if name.startswith(f"{group}."):
                            assert torch.equal(tensor[block], before[name][block])
    assert found == [expected] * len(found)
    assert len(layouts) == 1


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_a_layer_ends_where_its_heads_of_every_shard_do(order: str) -> None:
    case, apart = Case(order, [3], 4, 4, 8, 1, 4), 4096
    data = case.data(1)
    for layer in range(3):
        data[0][layer] = layer + 1
    tensors, _ = held(case, data, 1, 0)
    layout = describe_kv_caches(
        tensors, 4 * case.room, num_blocks=NUM_BLOCKS, shards=HeadShards(4, 1, apart)
    )
    host = bytearray(4 * apart)
    by_layer, done = layout.by_layer, 0
    [addresses] = by_layer.gpu_addresses(np.array([2])).tolist()
    for number, end in enumerate(layout.layer_ends.values(), 1):
        for segment in range(done, end):
            at, size = int(by_layer.offsets[segment]), int(by_layer.sizes[segment])
            host[at : at + size] = ctypes.string_at(addresses[segment], size)
        done = end
        assert all(host.count(layer) == 4 * case.room // 3 for layer in range(1, number + 1))
    assert done == len(by_layer.sizes)
    shards = case.expected(data, [(0, 2)])
    assert bytes(host) == b"".join(shard.ljust(apart, b"\0") for shard in shards)


def test_small_copies_are_taken_in_pieces() -> None:
    heads, tokens = 2, PIECE_RUNS // 16
    tensors = {"a": torch.zeros(20, tokens, heads, 8, dtype=torch.uint8)}
    layout = describe_kv_caches(
        tensors, tokens * heads * 8, shards=HeadShards(2, 2, tokens * 8)
    )  # fmt: skip
    with HostSegment.create(tokens * heads * 8, 20) as segment:
        segment.map(populate=False)
        blocks = pack_ids(np.arange(20))
        op = OpAddresses([layout], segment).copies_of(Execute(1, OpKind.D2H, blocks, blocks, 1))
        counts = []
        while not op.is_over:
            counts.append(len(op.take(1 << 30).sizes))
    assert sum(counts) == 20 * tokens * heads
    assert max(counts) == PIECE_RUNS
    assert len(counts) == 3


@pytest.mark.parametrize(
    ("shards", "named"),
    [
        (HeadShards(2, None, 64), "layer: store_shards .*head_dim"),
        (HeadShards(2, 9, 64), "layer: shape .* has no dimension 9"),
        (HeadShards(3, 1, 64), "layer: 4 heads do not divide into the 3 shards"),
    ],
)
def test_heads_that_cannot_be_told_apart_are_refused(shards: HeadShards, named: str) -> None:
    tensors = {"layer": torch.zeros(4, 4, 2, 8, dtype=torch.uint8)}
    with pytest.raises(UnsupportedLayoutError, match=named):
        describe_kv_caches(tensors, 64, shards=shards)


# -- the model -----------------------------------------------------------------------------------


def model(**shape: Any) -> ModelConfig:
    return ModelConfig("m", **{"num_layers": 4, "num_kv_heads": 8, "head_size": 64,
                               "dtype": torch.bfloat16, **shape})  # fmt: skip


STATES = (KVGroup("full", 16), KVGroup("state", 16))


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"store_shards": 3}, "store_shards = 3: must divide num_kv_heads = 8"),
        ({"store_shards": 16}, "store_shards = 16: must divide num_kv_heads"),
        ({"store_shards": 2, "tp_size": 4}, "store_shards = 2: must be a multiple of 4"),
        ({"store_shards": 0}, "store_shards = 0"),
        ({"store_shards": True}, "store_shards = True"),
        ({"store_shards": 2, "groups": STATES}, "store_shards = 2: must be 1, or unset: .*states"),
        ({"store_shards": 2, "groups": STATES, "use_mla": True}, "store_shards = 2: .*states"),
        ({"store_shards": 8, "tp_size": 4, "groups": STATES}, "store_shards = 8: must be 4"),
        ({"store_shards": 4, "tp_size": 2, "cp_size": 2, "sized_by_ranks": True}, "than heads"),
        ({"store_shards": 8, "tp_size": 4, "kv_replicas": 2}, "store_shards = 8: must be 2"),
    ],
)
def test_shards_that_heads_do_not_make_are_refused_by_name(
    shape: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        model(**shape)


def test_as_many_shards_as_ranks_are_what_a_cache_without_the_setting_stores() -> None:
    for shape in (
        {"tp_size": 4}, {"tp_size": 2, "groups": STATES}, {"tp_size": 4, "pp_size": 2},
        {"tp_size": 4, "use_mla": True}, {"tp_size": 4, "kv_replicas": 2},
    ):  # fmt: skip
        default = model(**shape, sized_by_ranks=True)
        parts = default.tp_size // default.num_replicas
        same = default.in_shards(parts)
        assert same.fingerprint(16) == default.fingerprint(16)
        bytes_of_ranks = [5000] * default.num_ranks
        assert Shards.of_ranks(same, bytes_of_ranks) == Shards.of_ranks(default, bytes_of_ranks)


def test_any_number_of_ranks_has_the_name_and_the_sizes_of_as_many_as_there_are_shards() -> None:
    eight = model(tp_size=8)
    for tp_size in (1, 2, 4, 8):
        shared = model(tp_size=tp_size, store_shards=8)
        assert shared.fingerprint(16) == eight.fingerprint(16)
        shards = Shards.of_model(shared, 16)
        assert (shards.sizes, shards.per_rank) == (Shards.of_model(eight, 16).sizes, 8 // tp_size)
        assert shared.token_size_in_bytes == eight.token_size_in_bytes
        assert shards.stored_bytes == Shards.of_model(eight, 16).stored_bytes
        assert sum(shards.rank_bytes) == shards.block_bytes
    replicated = model(tp_size=16, store_shards=8)  # two ranks hold each head
    assert replicated.fingerprint(16) == eight.fingerprint(16)
    assert Shards.of_model(replicated, 16) == Shards(Shards.of_model(eight, 16).sizes, 2)
    latent = model(use_mla=True, num_kv_heads=1)
    assert latent.in_shards(8) != latent
    assert latent.in_shards(8).fingerprint(16) == latent.fingerprint(16)
    assert Shards.of_model(latent.in_shards(8), 16) == Shards.of_model(latent, 16)


def test_shards_of_stages_are_the_same_for_any_number_of_ranks_of_a_stage() -> None:
    layouts = []
    for tp_size, per_rank in ((1, 4), (2, 2), (4, 1)):
        staged = model(pp_size=2, tp_size=tp_size, store_shards=4, sized_by_ranks=True)
        told = [size // tp_size for size in (8000, 4000) for _ in range(tp_size)]
        shards = Shards.of_ranks(staged, told)
        assert shards.sizes == (2000,) * 4 + (1000,) * 4
        assert shards.segment_bytes == [4096 * per_rank] * 2 * tp_size
        of_ranks = ShardLayouts(len(shards.storing_ranks), shards.per_rank)
        for rank in range(2 * tp_size):
            of_ranks.set(rank, "ab"[rank // tp_size], is_first=False)
        layouts.append(of_ranks.whole)
    assert layouts == ['["a", "a", "a", "a", "b", "b", "b", "b"]'] * 3
    odd = model(tp_size=2, store_shards=4, sized_by_ranks=True)
    with pytest.raises(ConfigError, match="store_shards = 4: rank 1 holds 33 bytes"):
        Shards.of_ranks(odd, [32, 33])
