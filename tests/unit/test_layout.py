"""describe_kv_caches: the bytes it finds for a block, against torch's own view."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcache.errors import UnsupportedLayoutError
from flexcache.storage.layout import (
    BlockLayout,
    bytes_per_block,
    bytes_per_index,
    describe_kv_caches,
)

Tensors = dict[str, torch.Tensor]

NUM_LAYERS = 3
NUM_BLOCKS = 4
NUM_HEADS = 2
HEAD_SIZE = 8
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


# -- tensors as engines make them ----------------------------------------------------------------


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of random bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


def layers(make: Callable[[], torch.Tensor]) -> Tensors:
    return {f"model.layers.{i}": make() for i in range(NUM_LAYERS)}


def joined(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """K and V next to each other in a block."""
    return layers(lambda: random_tensor((blocks, 2, tokens, NUM_HEADS, HEAD_SIZE), dtype)), 0


def split(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """All of K, then all of V."""
    return layers(lambda: random_tensor((2, blocks, tokens, NUM_HEADS, HEAD_SIZE), dtype)), 1


def heads_first(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    return layers(lambda: random_tensor((blocks, NUM_HEADS, tokens, 2 * HEAD_SIZE), dtype)), 0


def heads_first_by_strides(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Shaped as tokens before heads, but laid out the other way."""
    return layers(
        lambda: random_tensor((blocks, 2, NUM_HEADS, tokens, HEAD_SIZE), dtype).transpose(2, 3)
    ), 0


def blocks_outermost(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Shaped as K and V split, but laid out joined."""
    return layers(
        lambda: random_tensor((blocks, 2, tokens, NUM_HEADS, HEAD_SIZE), dtype).transpose(0, 1)
    ), 1


def views_of_one_buffer(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """The layers of a block next to each other."""
    shape = (blocks, NUM_LAYERS, NUM_HEADS, tokens, 2 * HEAD_SIZE)
    shared = random_tensor(shape, dtype)
    views = iter(shared.unbind(1))
    return layers(lambda: next(views)), 0


def heads_before_layers(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Each head of all layers of a block next to each other: a layer is in pieces."""
    shared = random_tensor((blocks, NUM_HEADS, NUM_LAYERS, tokens, 2 * HEAD_SIZE), dtype)
    views = iter(shared.unbind(2))
    return layers(lambda: next(views)), 0


def layers_one_after_the_other(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Views of one buffer too, each layer's blocks together."""
    shared = random_tensor((NUM_LAYERS, blocks, tokens, NUM_HEADS, HEAD_SIZE), dtype)
    views = iter(shared.unbind(0))
    return layers(lambda: next(views)), 0


def padded_blocks(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    return layers(
        lambda: random_tensor((blocks, tokens + 1, NUM_HEADS, HEAD_SIZE), dtype)[:, :tokens]
    ), 0


def padded_heads(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Each head is a separate piece."""
    return layers(
        lambda: random_tensor((blocks, tokens, NUM_HEADS, HEAD_SIZE + 3), dtype)[..., :HEAD_SIZE]
    ), 0


def latent(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """MLA: one vector per token."""
    return layers(lambda: random_tensor((blocks, tokens, 5 * HEAD_SIZE), dtype)), 0


def mixed(blocks: int, tokens: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Layers that differ in shape and dtype."""
    return {
        "attention": random_tensor((blocks, 2, tokens, NUM_HEADS, HEAD_SIZE), dtype),
        "indexer": random_tensor((blocks, tokens, 12), torch.uint8),
        "wide": random_tensor((blocks, 2, tokens, NUM_HEADS, 2 * HEAD_SIZE), torch.float32),
    }, 0


Engine = Callable[[int, int, torch.dtype], tuple[Tensors, int]]
ENGINES: list[Engine] = [
    joined, split, heads_first, heads_first_by_strides, blocks_outermost, views_of_one_buffer,
    layers_one_after_the_other, padded_blocks, padded_heads, latent, mixed,
]  # fmt: skip


# -- the two readings of a block -----------------------------------------------------------------


def gather(layout: BlockLayout, block: int) -> bytes:
    """Return the block's bytes as the layout describes them."""
    (addresses,) = layout.gpu_addresses(np.array([block], dtype=np.int64))
    return b"".join(
        ctypes.string_at(address, size)
        for address, size in zip(addresses.tolist(), layout.sizes.tolist(), strict=True)
    )


def in_memory_order(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in memory order."""
    raw = tensor.view(_AS_INTEGERS[tensor.element_size()])
    order = sorted(range(raw.dim()), key=raw.stride, reverse=True)
    return raw.permute(order).contiguous().numpy().tobytes()


def reference(tensors: Tensors, block_dim: int, block: int) -> bytes:
    return b"".join(in_memory_order(tensor.select(block_dim, block)) for tensor in tensors.values())


def one_piece(tensors: Tensors, block: int, num_blocks: int) -> bytes:
    """Return the bytes of a block of views of one buffer as they are there."""
    size = bytes_per_block(tensors, num_blocks)
    first = min(tensor.data_ptr() for tensor in tensors.values())
    return ctypes.string_at(first + block * size, size)


def describe(tensors: Tensors, block_dim: int, ratio: int = 1) -> BlockLayout:
    size = ratio * bytes_per_index(tensors, block_dim)
    num_indices = next(iter(tensors.values())).shape[block_dim]
    num_blocks = None if ratio == 1 else num_indices // ratio
    return describe_kv_caches(tensors, size, block_dim, num_blocks=num_blocks)


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [16, 32, 128])
def test_a_block_is_what_torch_selects_of_every_layer(
    engine: Engine, dtype: torch.dtype, tokens: int
) -> None:
    tensors, block_dim = engine(NUM_BLOCKS, tokens, dtype)
    layout = describe(tensors, block_dim)
    assert layout.num_blocks == NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        expected = reference(tensors, block_dim, block)
        assert gather(layout, block) == expected
        assert len(expected) == layout.block_bytes == layout.sizes.sum()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ratio", [2, 4])
def test_finer_blocks_of_a_kernel_are_grouped(
    engine: Engine, dtype: torch.dtype, ratio: int
) -> None:
    tensors, block_dim = engine(NUM_BLOCKS * ratio, 16, dtype)
    layout = describe(tensors, block_dim, ratio)
    assert layout.num_blocks == NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        if engine is views_of_one_buffer:  # a layer is in pieces, a block is not
            assert gather(layout, block) == one_piece(tensors, block, NUM_BLOCKS)
            continue
        whole = {
            name: tensor.narrow(block_dim, block * ratio, ratio) for name, tensor in tensors.items()
        }
        assert gather(layout, block) == b"".join(map(in_memory_order, whole.values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_in_one_piece_is_one_segment_though_its_layers_are_not(dtype: torch.dtype) -> None:
    tensors, _ = heads_before_layers(NUM_BLOCKS, 16, dtype)
    layout = describe(tensors, 0)
    assert len(layout.sizes) == 1
    for block in range(NUM_BLOCKS):
        assert gather(layout, block) == one_piece(tensors, block, NUM_BLOCKS)
    assert set(layout.layer_ends.values()) == {1}  # all layers arrive together


def test_the_order_of_layers_in_one_piece_is_part_of_the_layout() -> None:
    tensors, _ = heads_before_layers(NUM_BLOCKS, 16, torch.bfloat16)
    names = list(tensors)
    turned = dict(zip(names, [*list(tensors.values())[1:], tensors[names[0]]], strict=True))
    assert describe(tensors, 0).signature != describe(turned, 0).signature
    again, _ = heads_before_layers(2 * NUM_BLOCKS, 16, torch.bfloat16)
    assert describe(tensors, 0).signature == describe(again, 0).signature


@pytest.mark.parametrize("engine", [joined, split, views_of_one_buffer, latent])
def test_a_block_dimension_may_be_counted_from_the_end(engine: Engine) -> None:
    tensors, block_dim = engine(NUM_BLOCKS, 16, torch.bfloat16)
    from_the_end = block_dim - next(iter(tensors.values())).dim()
    layout = describe(tensors, from_the_end)
    assert gather(layout, 2) == reference(tensors, block_dim, 2)
    assert layout.signature == describe(tensors, block_dim).signature


@st.composite
def strange_tensors(draw: st.DrawFn) -> tuple[Tensors, int]:
    """Dense tensors cut out of larger ones, with their dimensions in any order."""
    num_dims = draw(st.integers(1, 4))
    block_dim = draw(st.integers(0, num_dims - 1))
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.permutations(range(num_dims)))
    tensors: Tensors = {}
    for i in range(draw(st.integers(1, 3))):
        shape = draw(st.tuples(*[st.integers(1, 3)] * num_dims))
        shape = (*shape[:block_dim], 3, *shape[block_dim + 1 :])
        padding = draw(st.tuples(*[st.sampled_from([0, 0, 1])] * num_dims))
        steps = draw(st.tuples(*[st.sampled_from([1, 1, 2])] * num_dims))
        outer = [(shape[dim] * steps[dim]) + padding[dim] for dim in order]
        tensor = random_tensor(tuple(outer), dtype).permute(
            [order.index(d) for d in range(num_dims)]
        )
        for dim in range(num_dims):
            tensor = tensor.narrow(dim, 0, shape[dim] * steps[dim])
        tensors[f"layer {i}"] = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensors, block_dim


@given(strange_tensors())
def test_sliced_and_permuted_dense_tensors_are_read_correctly(
    drawn: tuple[Tensors, int],
) -> None:
    tensors, block_dim = drawn
    layout = describe(tensors, block_dim)
    for block in range(3):
        assert gather(layout, block) == reference(tensors, block_dim, block)


def test_the_addresses_of_many_blocks_equal_those_of_each() -> None:
    tensors, block_dim = split(NUM_BLOCKS, 16, torch.bfloat16)
    layout = describe(tensors, block_dim)
    picked = np.array([3, 0, 3], dtype=np.int64)
    together = layout.gpu_addresses(picked)
    assert together.shape == (3, len(layout.sizes))
    for row, block in zip(together, picked.tolist(), strict=True):
        assert (row == layout.gpu_addresses(np.array([block]))[0]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_in_the_host_pool_the_segments_of_a_block_are_contiguous(
    engine: Engine,
) -> None:
    layout = describe(*engine(NUM_BLOCKS, 16, torch.bfloat16))
    at = layout.host_addresses((1 << 20) + np.array([0, 3], dtype=np.int64) * (1 << 16))
    assert at[0, 0] == 1 << 20
    assert (at[:, 1:] == at[:, :-1] + layout.sizes[:-1]).all()
    assert (at[:, -1] + layout.sizes[-1] == at[:, 0] + layout.block_bytes).all()
    assert (at[1] - at[0] == 3 << 16).all()


# -- segments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "num_segments"),
    [
        (joined, NUM_LAYERS),
        (split, 2 * NUM_LAYERS),
        (heads_first, NUM_LAYERS),
        (heads_first_by_strides, NUM_LAYERS),
        (blocks_outermost, NUM_LAYERS),
        (views_of_one_buffer, 1),
        (layers_one_after_the_other, NUM_LAYERS),
        (padded_blocks, NUM_LAYERS),
        (padded_heads, NUM_LAYERS * 16 * NUM_HEADS),
        (latent, NUM_LAYERS),
    ],
)
def test_a_block_has_no_more_segments_than_separate_pieces(
    engine: Engine, num_segments: int
) -> None:
    layout = describe(*engine(NUM_BLOCKS, 16, torch.bfloat16))
    assert len(layout.sizes) == num_segments


def test_finer_blocks_that_are_neighbours_make_one_segment() -> None:
    tensors, block_dim = joined(NUM_BLOCKS * 4, 16, torch.bfloat16)
    assert len(describe(tensors, block_dim, ratio=4).sizes) == NUM_LAYERS


def test_one_block_is_a_cache_too() -> None:
    for engine in ENGINES:
        tensors, block_dim = engine(1, 16, torch.bfloat16)
        layout = describe(tensors, block_dim)
        assert layout.num_blocks == 1
        assert gather(layout, 0) == reference(tensors, block_dim, 0)


def test_layers_that_share_their_tensor_are_moved_once() -> None:
    tensors, block_dim = joined(NUM_BLOCKS, 16, torch.bfloat16)
    (first, *_) = tensors.values()
    shared = {**tensors, "shares": first, "views": first.view(first.shape)}
    layout = describe_kv_caches(shared, bytes_per_index(tensors), block_dim)
    assert bytes_per_index(shared) == bytes_per_index(tensors)
    assert gather(layout, 1) == reference(tensors, block_dim, 1)
    assert layout.signature == describe(tensors, block_dim).signature


# -- layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_segments_up_to_a_layers_end_hold_it_and_all_before_it(engine: Engine) -> None:
    tensors, block_dim = engine(NUM_BLOCKS, 16, torch.bfloat16)
    layout = describe(tensors, block_dim)
    assert list(layout.layer_ends) == list(tensors)
    stored = gather(layout, 1)
    names = list(tensors)
    for i, name in enumerate(names):
        until = {n: tensors[n] for n in names[: i + 1]}
        expected = reference(until, block_dim, 1)
        end, sizes = layout.layer_ends[name], layout.by_layer.sizes
        assert stored[: int(sizes[:end].sum())] == expected
    assert layout.layer_ends[names[-1]] == len(layout.by_layer.sizes)


def test_blocks_in_one_piece_have_segments_by_layer_too() -> None:
    tensors, _ = views_of_one_buffer(NUM_BLOCKS, 16, torch.bfloat16)
    layout = describe(tensors, 0)
    blocks, starts = np.arange(NUM_BLOCKS), np.arange(NUM_BLOCKS) << 16
    by_layer = layout.by_layer
    assert (len(layout.sizes), len(by_layer.sizes)) == (1, NUM_LAYERS)
    assert gather(by_layer, 1) == gather(layout, 1)
    assert (by_layer.gpu_addresses(blocks)[:, 0] == layout.gpu_addresses(blocks)[:, 0]).all()
    assert (by_layer.host_addresses(starts)[:, 0] == layout.host_addresses(starts)[:, 0]).all()


def test_a_layer_that_shares_anothers_tensor_is_loaded_with_it() -> None:
    tensors, block_dim = joined(NUM_BLOCKS, 16, torch.bfloat16)
    names = list(tensors)
    shared = {**tensors, "shares": tensors[names[1]]}
    ends = describe_kv_caches(shared, bytes_per_index(tensors), block_dim).layer_ends
    assert ends["shares"] == ends[names[1]] < ends[names[2]]


# -- what ranks compare --------------------------------------------------------------------------


def test_layouts_whose_stored_bytes_differ_in_order_have_different_signatures() -> None:
    by_bytes: dict[str, list[int]] = {}
    shape = (2, 2 * NUM_BLOCKS, 4, 2)
    for order in itertools.permutations(range(4)):
        source = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape)
        # The same numbers at the same indices, laid out in another order.
        turned = source.permute(order).contiguous().permute([order.index(d) for d in range(4)])
        assert torch.equal(turned, source)
        for ratio in (1, 2):
            layout = describe({"layer": turned}, 1, ratio)
            stored = list(np.frombuffer(gather(layout, 1), dtype=np.int32))
            assert by_bytes.setdefault(f"{ratio}: {layout.signature}", stored) == stored


def test_ranks_with_the_same_shapes_have_the_same_signature() -> None:
    for engine in ENGINES:
        one, other = (describe(*engine(NUM_BLOCKS, 16, torch.bfloat16)) for _ in range(2))
        more_blocks = describe(*engine(NUM_BLOCKS + 1, 16, torch.bfloat16))
        assert one.signature == other.signature == more_blocks.signature
        finer = describe(*engine(NUM_BLOCKS, 32, torch.bfloat16))
        assert one.signature != finer.signature


def test_a_signature_stays_short_for_many_identical_layers() -> None:
    tensors = {f"{i}": random_tensor((2, 2, 4, 2, 8), torch.bfloat16) for i in range(60)}
    assert describe(tensors, 0).signature.startswith("60xbfloat16")
    assert "," not in describe(tensors, 0).signature


# -- what is refused -----------------------------------------------------------------------------


def refusal(tensors: Tensors, block_bytes: int, block_dim: int = 0) -> str:
    with pytest.raises(UnsupportedLayoutError) as caught:
        describe_kv_caches(tensors, block_bytes, block_dim)
    return str(caught.value)


BASE = torch.zeros(4096, dtype=torch.uint8)
OVERLAPPING = {
    "one row for all tokens": torch.zeros(4, 1, 8).expand(4, 16, 8),
    "one block for all": torch.zeros(1, 16, 8).expand(4, 16, 8),
    "one head for all": torch.zeros(4, 16, 1, 8).expand(4, 16, 2, 8),
    "K is V": torch.zeros(4, 1, 16, 8).expand(4, 2, 16, 8),
    "blocks that reach into the next": BASE.as_strided((4, 16), (8, 1)),
    "tokens that reach into the next": BASE.as_strided((4, 4, 16), (128, 8, 1)),
    "blocks between each other": BASE.as_strided((4, 2, 4), (6, 8, 1)),
    "pieces between each other": BASE.as_strided((4, 2, 2, 4), (64, 8, 6, 1)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_tensor_that_overlaps_itself_is_refused(name: str) -> None:
    fine = {"fine": torch.zeros(4, 16, 8)}
    tensors = {**fine, name: OVERLAPPING[name]}
    message = refusal(tensors, bytes_per_index(tensors))
    assert message.startswith(f"{name}: ")
    assert "overlaps itself" in message
    assert str(tuple(OVERLAPPING[name].shape)) in message


@pytest.mark.parametrize(
    "wrong", [lambda size: size + 1, lambda size: size - 1, lambda size: size // 2, lambda _: 0]
)
def test_a_block_size_other_than_the_models_is_refused(wrong: Callable[[int], int]) -> None:
    tensors, _ = joined(NUM_BLOCKS, 16, torch.bfloat16)
    size = bytes_per_index(tensors)
    message = refusal(tensors, wrong(size))
    assert f" {size} bytes in the 3 KV tensors" in message
    assert f" {wrong(size)} in the cache" in message


def test_finer_blocks_that_do_not_fill_the_last_one_are_refused() -> None:
    tensors, _ = joined(5, 16, torch.bfloat16)
    with pytest.raises(UnsupportedLayoutError, match=r"5 indices .* do not divide into 2 blocks"):
        describe_kv_caches(tensors, 2 * bytes_per_index(tensors), num_blocks=2)


def test_a_missing_layer_is_not_made_up_for_by_more_blocks_of_the_others() -> None:
    tensors, _ = joined(NUM_BLOCKS * 3, 16, torch.bfloat16)
    first = dict(list(tensors.items())[:1])
    assert "num_blocks is missing" in refusal(first, bytes_per_index(tensors))


def test_layers_with_different_numbers_of_blocks_are_refused() -> None:
    tensors = {"a": torch.zeros(4, 16, 8), "b": torch.zeros(6, 16, 8)}
    assert "[4, 6] blocks in dimension 0" in refusal(tensors, bytes_per_index(tensors))


def test_the_wrong_block_dimension_is_refused_where_it_shows() -> None:
    tensors, _ = split(NUM_BLOCKS, 16, torch.bfloat16)
    wanted = bytes_per_index(tensors, 1)
    message = refusal(tensors, wanted, block_dim=0)
    assert f" {bytes_per_index(tensors, 0)} bytes in the 3 KV tensors" in message
    assert f" {wanted} in the cache" in message


@pytest.mark.parametrize("block_dim", [3, 7, -4])
def test_a_block_dimension_that_a_tensor_lacks_is_refused(block_dim: int) -> None:
    tensors = {"deep": torch.zeros(4, 2, 2, 16, 2, 2, 2, 2), "flat": torch.zeros(4, 16, 8)}
    message = refusal(tensors, 4096, block_dim)
    assert message.startswith("flat: shape (4, 16, 8)")
    assert f"no block dimension {block_dim}" in message


def test_no_tensors_are_refused() -> None:
    assert "no KV tensors" in refusal({}, 4096)


def test_a_cache_without_blocks_is_refused() -> None:
    assert "no block in dimension 0" in refusal({"empty": torch.zeros(0, 16, 8)}, 4096)


def test_what_is_not_a_tensor_is_refused_by_name() -> None:
    message = refusal({"a": torch.zeros(4, 16, 8), "b": [torch.zeros(4)]}, 4096)  # type: ignore[dict-item]
    assert message == "b: list is not a tensor"


def test_tensors_on_several_devices_are_refused() -> None:
    tensors = {"a": torch.zeros(4, 16, 8), "b": torch.zeros(4, 16, 8, device="meta")}
    assert "['cpu', 'meta']" in refusal(tensors, 4096)


# -- the engine's own number of blocks -----------------------------------------------------------


def by_count(tensors: Tensors, num_blocks: int) -> BlockLayout:
    size = bytes_per_block(tensors, num_blocks)
    return describe_kv_caches(tensors, size, num_blocks=num_blocks)


def test_padding_between_blocks_is_not_moved() -> None:
    content, page = 96, 128  # a state in a page of the attention layers' size
    raw = random_tensor((2, NUM_BLOCKS, page), torch.uint8).view(torch.int8)
    states = {f"state.{i}": raw[i, :, None, None, :content] for i in range(2)}
    layout = by_count(states, NUM_BLOCKS)
    assert layout.block_bytes == layout.sizes.sum() == 2 * content
    assert layout.num_blocks == NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        assert gather(layout, block) == reference(states, 0, block)
        starts = layout.gpu_addresses(np.array([block]))[0] - raw.data_ptr()
        covered = {int(at) % page + offset for at in starts for offset in range(content)}
        assert covered == set(range(content))


def test_layers_may_count_different_parts_of_a_block() -> None:
    fine = random_tensor((2 * NUM_BLOCKS, 8, HEAD_SIZE), torch.bfloat16)
    coarse = random_tensor((NUM_BLOCKS, 16, 2 * HEAD_SIZE), torch.bfloat16)
    layout = by_count({"fine": fine, "coarse": coarse}, NUM_BLOCKS)
    for block in range(NUM_BLOCKS):
        expected = in_memory_order(fine[2 * block : 2 * block + 2]) + in_memory_order(coarse[block])
        assert gather(layout, block) == expected
    halves = {"fine": fine, "coarse": coarse.view(2 * NUM_BLOCKS, 8, 2 * HEAD_SIZE)}
    assert by_count(halves, NUM_BLOCKS).block_bytes == layout.block_bytes


def test_a_tensor_that_does_not_hold_the_engines_blocks_is_refused_by_name() -> None:
    tensors = {"whole": torch.zeros(8, 16), "torn": torch.zeros(6, 16)}
    with pytest.raises(UnsupportedLayoutError, match=r"torn: 6 indices of dimension 0 .* 4 blocks"):
        by_count(tensors, 4)
    with pytest.raises(UnsupportedLayoutError, match=r"has 256 bytes in the 1 .* but 257 in the"):
        describe_kv_caches({"whole": torch.zeros(8, 16)}, 257, num_blocks=2)
