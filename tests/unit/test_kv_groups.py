"""What a prompt needs of each kind of group to be resumed, against the tokens that are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcache.config import KVGroup, ModelConfig
from flexcache.config.model import UnitShape
from flexcache.errors import ConfigError


@given(
    size=st.sampled_from([1, 4, 16]),
    num_blocks=st.integers(1, 40),
    window=st.integers(1, 100),
    kind=st.sampled_from(["full", "window", "chunked"]),
)
def test_the_blocks_needed_are_those_of_the_tokens_that_the_next_token_reads(
    size: int, num_blocks: int, window: int, kind: str
) -> None:
    group = KVGroup(kind, size, 0 if kind == "full" else window)  # type: ignore[arg-type]
    num_tokens = size * num_blocks
    first = {
        "full": 0,
        "window": max(0, num_tokens - window + 1),
        "chunked": num_tokens - num_tokens % window,
    }[kind]
    read = sorted({token // size for token in range(first, num_tokens)})
    needed = range(group.first_needed(num_tokens), num_blocks)
    assert list(needed) == read
    assert group.num_needed(num_tokens) == len(read)


def test_a_state_is_the_one_block_before() -> None:
    group = KVGroup("state", 16)
    assert [group.num_needed(n) for n in (16, 32, 160)] == [1, 1, 1]
    assert group.first_needed(160) == 9


def test_a_state_may_be_several_blocks() -> None:
    groups = [KVGroup("full", 16), KVGroup("state", 16, blocks_per_state=5)]
    assert [groups[1].num_needed(n) for n in (0, 16, 160)] == [0, 5, 5]
    assert UnitShape(groups, 16).tail_units(3) == 5
    assert groups[1].describe() != KVGroup("state", 16).describe()


def test_units_hold_the_dense_blocks_of_a_position_and_tails_fill_them_up() -> None:
    shape = UnitShape([KVGroup("window", 256, 512), KVGroup("full", 128)], 256)
    assert (shape.blocks_per_unit, shape.dense_blocks) == (2, 2)
    assert [shape.tail_blocks(position) for position in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert [shape.tail_units(position) for position in (1, 2, 3)] == [1, 1, 1]
    wide = UnitShape([KVGroup("window", 16, 512), KVGroup("full", 16)], 16)
    assert (wide.blocks_per_unit, wide.tail_units(100), wide.largest_tail_units) == (1, 32, 32)
    states = UnitShape([KVGroup("state", 16)], 16)
    assert (states.blocks_per_unit, states.dense_blocks, states.tail_units(3)) == (1, 0, 1)
    chunks = UnitShape([KVGroup("chunked", 16, 64), KVGroup("full", 16)], 16)
    assert [chunks.tail_units(position) for position in (1, 3, 4, 5)] == [1, 3, 1, 1]
    assert chunks.largest_tail_units == 3
    single = UnitShape([], 16)
    assert (single.blocks_per_unit, single.dense_blocks, single.sparse) == (1, 1, [])
    assert single.largest_tail_units == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 16), "kind = 'ring'"),
        (("full", 0), "tokens_per_block = 0"),
        (("full", 16, 64), "window = 64"),
        (("window", 16), "window = 0"),
        (("state", 16, 1), "window = 1"),
        (("state", 16, 0, (), 0), "blocks_per_state = 0"),
        (("full", 16, 0, (), 2), "blocks_per_state = 2"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_by_name(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVGroup(*arguments)  # type: ignore[arg-type]


def test_a_position_must_be_whole_blocks_of_every_group() -> None:
    with pytest.raises(ConfigError, match="tokens_per_block = 128: must be a multiple of 256"):
        UnitShape([KVGroup("full", 128), KVGroup("window", 256, 512)], 128)


def test_groups_are_part_of_what_a_model_is_called() -> None:
    def fingerprint(*groups: KVGroup) -> str:
        model = ModelConfig("m", 2, 4, 64, torch.bfloat16, groups=groups)
        return model.fingerprint(16)

    full = KVGroup("full", 16)
    others = [
        (full, KVGroup("window", 16, 64)),
        (full, KVGroup("window", 16, 65)),
        (KVGroup("window", 16, 64), full),
        (full, KVGroup("chunked", 16, 64)),
        (full, KVGroup("state", 16)),
        (full, KVGroup("window", 16, 64, ("layer.0",))),
        (full, KVGroup("window", 16, 64, ("layer.1",))),
        (full,),
        (),
    ]
    assert len({fingerprint(*groups) for groups in others}) == len(others)
    assert fingerprint().endswith("|layout=v1")
    with pytest.raises(ConfigError, match="groups"):
        ModelConfig("m", 2, 4, 64, torch.bfloat16, groups=("full",))  # type: ignore[arg-type]


def test_groups_are_read_from_a_settings_file() -> None:
    table = {
        "model_id": "m", "num_layers": 2, "num_kv_heads": 4, "head_size": 64, "dtype": "bfloat16",
        "groups": [{"kind": "full", "tokens_per_block": 16, "layers": ["a"]},
                   {"kind": "window", "tokens_per_block": 16, "window": 64}],
    }  # fmt: skip
    model = ModelConfig.from_table(table)
    assert model.groups == (KVGroup("full", 16, 0, ("a",)), KVGroup("window", 16, 64))
    assert model.has_tails
    assert not model.has_states
    with pytest.raises(ConfigError, match="model"):
        ModelConfig.from_table({**table, "groups": [{"kind": "full", "size": 16}]})
