"""Slots in every form over real files: bytes come back, fewer are moved, damage is found."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.errors import MissingDependencyError
from flexcache.storage.block_io import Direction, open_block_io
from flexcache.storage.compression import Codec
from flexcache.storage.slot_index import FORM, SlotForms
from flexcache.storage.slot_io import FULL, SlotIO, SlotMove, SlotPacker, filled_bytes

SLOT_BYTES, NUM_SLOTS = 65536, 8
CODECS = [Codec.ZSTD, Codec.LZ4]


def floats(seed: int, num_bytes: int = SLOT_BYTES) -> bytes:
    """Return bfloat16 noise, as KV roughly is."""
    noise = np.random.default_rng(seed).standard_normal(num_bytes // 2).astype("<f4")
    return (noise.view("<u4") >> 16).astype("<u2").tobytes()


def in_pieces(content: bytes, cuts: Sequence[int] = ()) -> list[memoryview]:
    edges = [0, *sorted(cuts), len(content)]
    return [memoryview(bytearray(content[a:b])) for a, b in pairwise(edges)]


# -- packing -------------------------------------------------------------------------------------


@given(
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 9),
    num_zeros=st.integers(0, SLOT_BYTES // 2).map(lambda words: 2 * words),
    cuts=st.lists(st.integers(0, SLOT_BYTES // 2).map(lambda words: 2 * words), max_size=3),
)
def test_a_packed_block_comes_back_and_fills_whole_pages(
    codec: Codec, seed: int, num_zeros: int, cuts: list[int]
) -> None:
    content = floats(seed)[num_zeros:] + bytes(num_zeros)
    packer, room = SlotPacker(codec, SLOT_BYTES), memoryview(bytearray(b"\xa5" * SLOT_BYTES))
    filled = packer.pack(in_pieces(content, cuts), room)
    assert 0 < filled < FULL
    end = filled_bytes(filled, SLOT_BYTES)
    assert end % 4096 == 0 and end < SLOT_BYTES
    assert not any(room[end - 8 : end]) or bytes(room[end:]) == b"\xa5" * (SLOT_BYTES - end)
    back = in_pieces(bytes(SLOT_BYTES), cuts)
    packer.unpack(room[:end], back)
    assert b"".join(back) == content


@pytest.mark.parametrize("codec", CODECS)
def test_floats_take_less_and_noise_is_left_alone(codec: Codec) -> None:
    packer, room = SlotPacker(codec, SLOT_BYTES), memoryview(bytearray(SLOT_BYTES))
    assert 0 < packer.pack(in_pieces(floats(1)), room) < 0.95 * FULL
    noise = np.random.default_rng(1).bytes(SLOT_BYTES)
    assert packer.pack(in_pieces(noise), room) == 0


@pytest.mark.parametrize("codec", CODECS)
def test_damage_raises_or_gives_other_bytes_and_nothing_else(codec: Codec) -> None:
    content = floats(3)
    packer, room = SlotPacker(codec, SLOT_BYTES), memoryview(bytearray(SLOT_BYTES))
    end = filled_bytes(packer.pack(in_pieces(content), room), SLOT_BYTES)
    rng, num_found = np.random.default_rng(7), 0
    for at in [*range(32), *rng.integers(32, end, 60).tolist()]:
        damaged = memoryview(bytearray(room[:end]))
        damaged[at] ^= 1 << int(rng.integers(8))
        back = in_pieces(bytes(SLOT_BYTES))
        try:
            packer.unpack(damaged, back)
        except ValueError:
            num_found += 1
    assert num_found > 5
    for cut in (0, 7, 8, 20, end // 2):
        with pytest.raises(ValueError):
            packer.unpack(room[:cut], in_pieces(bytes(SLOT_BYTES)))


# -- slots in a file -----------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"\xa5" * (NUM_SLOTS * SLOT_BYTES), 0)
    yield fd
    os.close(fd)


@pytest.fixture
def opened(file: int) -> Iterator[list[SlotIO]]:
    """What `slots_in` opens."""
    made: list[SlotIO] = []
    yield made
    for slots in made:
        slots.close()


@pytest.fixture(params=CODECS)
def slots(request: pytest.FixtureRequest, file: int, opened: list[SlotIO]) -> SlotIO:
    return slots_in(file, opened, np.zeros(NUM_SLOTS, FORM), request.param)


def slots_in(
    file: int, opened: list[SlotIO], forms: SlotForms | None, codec: Codec = Codec.NONE,
    packing: Executor | None = None,
) -> SlotIO:  # fmt: skip
    def locate(slot: int) -> tuple[int, int]:
        return file, slot * SLOT_BYTES

    io = open_block_io("threads", 4)
    opened.append(SlotIO(io, locate, SLOT_BYTES, forms, codec, packing))
    return opened[-1]


def move(slots: SlotIO, *requests: SlotMove) -> dict[int, SlotMove]:
    slots.submit(requests)
    moved: dict[int, SlotMove] = {}
    while len(moved) < len(requests):
        assert select.select(slots.filenos(), [], [], 60)[0]
        moved.update({each.token: each for each in slots.reap()})
    return moved


def write(slots: SlotIO, slot: int, content: bytes, may_pack: bool = True) -> SlotMove:
    request = SlotMove(1, Direction.WRITE, slot, in_pieces(content), may_pack)
    return move(slots, request)[1]


def read(slots: SlotIO, slot: int) -> tuple[SlotMove, bytes]:
    pieces = in_pieces(bytes(SLOT_BYTES), [SLOT_BYTES // 2])
    moved = move(slots, SlotMove(1, Direction.READ, slot, pieces))[1]
    return moved, b"".join(pieces)


def test_a_packed_slot_moves_fewer_bytes_both_ways_and_no_others_change(
    slots: SlotIO, file: int
) -> None:
    written = write(slots, 2, floats(1))
    assert written.problem is None
    assert written.num_bytes < SLOT_BYTES
    behind = os.pread(file, SLOT_BYTES, 2 * SLOT_BYTES + written.num_bytes)
    assert behind == b"\xa5" * SLOT_BYTES  # the rest of the slot, and the next
    moved, content = read(slots, 2)
    assert (moved.problem, moved.num_bytes) == (None, written.num_bytes)
    assert content == floats(1)


@pytest.mark.parametrize("may_pack", [True, False])
def test_what_does_not_shrink_or_must_not_be_packed_is_plain(
    slots: SlotIO, file: int, may_pack: bool
) -> None:
    content = np.random.default_rng(5).bytes(SLOT_BYTES) if may_pack else floats(2)
    write(slots, 3, floats(1))
    assert write(slots, 3, content, may_pack).num_bytes == SLOT_BYTES
    assert os.pread(file, SLOT_BYTES, 3 * SLOT_BYTES) == content
    assert read(slots, 3)[1] == content


def test_slots_of_every_form_are_read_with_their_forms_alone(
    slots: SlotIO, file: int, opened: list[SlotIO]
) -> None:
    contents = {0: floats(1), 1: np.random.default_rng(1).bytes(SLOT_BYTES), 2: bytes(SLOT_BYTES)}
    for slot, content in contents.items():
        write(slots, slot, content)
    forms = slots.forms_of(np.arange(NUM_SLOTS))
    assert forms is not None
    later = slots_in(file, opened, forms)  # packs nothing itself
    assert {slot: read(later, slot)[1] for slot in contents} == contents
    write(later, 0, floats(4))
    moved, content = read(later, 0)
    assert (moved.num_bytes, moved.problem, content) == (SLOT_BYTES, None, floats(4))


def test_a_slot_that_others_have_written_is_plain(slots: SlotIO, file: int) -> None:
    write(slots, 4, floats(1))
    os.pwrite(file, floats(2), 4 * SLOT_BYTES)
    slots.make_plain(np.array([4]))
    assert read(slots, 4)[1] == floats(2)


def test_a_damaged_or_cut_off_slot_is_a_problem_and_the_others_are_read(
    slots: SlotIO, file: int
) -> None:
    for slot in (0, 1, 2):
        write(slots, slot, floats(slot))
    os.pwrite(file, bytes(64), 0)  # the frame's header is gone
    os.ftruncate(file, 2 * SLOT_BYTES + 4096)
    room = {slot: in_pieces(bytes(SLOT_BYTES)) for slot in (0, 1, 2)}
    requests = [SlotMove(slot, Direction.READ, slot, room[slot]) for slot in room]
    moved = move(slots, *requests)
    assert moved[0].problem
    assert moved[1].problem is None
    assert b"".join(room[1]) == floats(1)
    assert "4096 of" in (moved[2].problem or "")


def test_more_requests_than_there_are_threads_all_end(slots: SlotIO) -> None:
    contents = {slot: floats(slot) for slot in range(slots.depth)}
    requests = [
        SlotMove(slot, Direction.WRITE, slot, in_pieces(content))
        for slot, content in contents.items()
    ]
    assert all(moved.problem is None for moved in move(slots, *requests).values())
    assert {slot: read(slots, slot)[1] for slot in contents} == contents


@pytest.mark.parametrize("codec", CODECS)
def test_a_read_does_not_wait_for_what_is_being_packed(
    file: int, opened: list[SlotIO], codec: Codec
) -> None:
    forms, may_pack = np.zeros(NUM_SLOTS, FORM), threading.Event()
    write(slots_in(file, opened, forms, codec), 0, floats(1))
    packing = ThreadPoolExecutor(1)
    packing.submit(may_pack.wait)
    slots = slots_in(file, opened, forms, codec, packing)
    writes = [SlotMove(slot, Direction.WRITE, slot, in_pieces(floats(slot))) for slot in (2, 3, 4)]
    slots.submit(writes)
    try:
        assert read(slots, 0)[1] == floats(1)
    finally:
        may_pack.set()
    num_written = 0
    while num_written < len(writes):
        assert select.select(slots.filenos(), [], [], 60)[0]
        num_written += len(slots.reap())
    assert read(slots, 4)[1] == floats(4)


def test_a_codec_without_its_library_is_refused_at_once(
    file: int, opened: list[SlotIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"\.\[compression\]"):
        slots_in(file, opened, np.zeros(NUM_SLOTS, FORM), Codec.ZSTD)
