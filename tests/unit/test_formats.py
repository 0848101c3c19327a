"""Numbered formats: each number keeps its form, and other numbers are detected.

Where a test with literal bytes fails, the format has changed: raise its number, and write into
docs/internals/formats.md what readers of either number do with the other's data.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from server_stats import SERVER_STATS
from task_builders import World

from flexcache.cache.block_keys import ENGINE_KEYS, EngineBlockKeys, LayoutRoots, make_root
from flexcache.cache.tail_index import TAIL_FIRST, tail_keys
from flexcache.config import CacheConfig, KVGroup, ModelConfig
from flexcache.events.wire import Page, cursor_of, pack_request
from flexcache.ids import BlockKey, OpKind
from flexcache.protocol.messages import PROTOCOL_VERSION, Refused
from flexcache.replay.traces import RecordedTrace
from flexcache.server.hub import Hub
from flexcache.server.observers import Observers
from flexcache.server.reactor import Reactor
from flexcache.server.state import ServerState
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import DATA_FILE, FORMAT_VERSION, INDEX_FILE, PoolHeader
from flexcache.storage.remote import objects
from flexcache.storage.remote.objects import BlockCodec, object_name
from flexcache.storage.shards import KVIdentity, ShardLayouts, Shards, digest
from flexcache.storage.slot_index import SlotIndex, make_records
from flexcache.tracing.tracer import Tracer, make_header

ROOT, KEY = b"r" * 16, b"k" * 16

# -- SSD -----------------------------------------------------------------------------------------

HEADER_2 = bytes.fromhex(
    "466c657853534469020000000000000070707070707070707070707070707070000010000000000002000000"
    "0100000004ee436e0ebbb533bcfba3fcf40ae9bd64eb7599c0af9685efaf7b3569e22da20c2732c0f82a68c0"
)
HEADER_3 = bytes.fromhex(
    "466c657853534469030000000000000070707070707070707070707070707070000010000000000002000000"
    "0100000004ee436e0ebbb533bcfba3fcf40ae9bd64eb7599c0af9685efaf7b3569e22da269012708b3a8ca7e"
)


def test_the_header_of_ssd_files_is_format_3() -> None:
    header = PoolHeader(b"p" * 16, 1 << 20, 2, 1, KVIdentity.of("model", "layout"))
    page = header.page(b"FlexSSDi")
    assert page.startswith(HEADER_3)
    assert page[512:].rstrip(b"\0") == b"model as layout"
    assert PoolHeader.parse(page) == header
    assert FORMAT_VERSION == 3


def pool(path: Path) -> DiskPool:
    return DiskPool([str(path)], 8192, 4, False)


def header_1(magic: bytes) -> bytes:
    fields = struct.pack("<8sI4x16sQII", magic, 1, b"p" * 16, 8192, 1, 0)
    return (fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))).ljust(4096, b"\0")


def test_ssd_files_of_format_1_count_as_empty_and_are_recreated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_records(ROOT, 0, b"", [KEY], np.zeros(1, np.uint64))
    (tmp_path / DATA_FILE).write_bytes(header_1(b"FlexSSDd") + bytes(4 * 8192))
    (tmp_path / INDEX_FILE).write_bytes(header_1(b"FlexSSDi") + bytes(4 * 128))
    with (tmp_path / INDEX_FILE).open("r+b") as file:
        SlotIndex([file.fileno()], b"p" * 16).write(np.array([0]), records)
    with caplog.at_level(logging.WARNING):
        opened = pool(tmp_path)
    try:
        assert len(opened.load()) == 0
        assert opened.identity is None
        assert "ssd_old_format" in caplog.text
    finally:
        opened.close()
    assert PoolHeader.parse((tmp_path / INDEX_FILE).read_bytes()[:4096]) is not None


def test_a_record_has_the_form_of_its_slot_between_the_lengths(tmp_path: Path) -> None:
    records = make_records(ROOT, 7, b"parent", [KEY], np.array([5], np.uint64))
    records["codec"], records["filled"], records["generation"] = 1, 171, 9
    with (tmp_path / "index").open("w+b", buffering=0) as file:
        SlotIndex([file.fileno()], b"p" * 16).write(np.array([0]), records)
        content = (tmp_path / "index").read_bytes()[4096:]
    assert content[8:36].hex() == "09000000000000000500000000000000070000001001" + "06ab" + "72" * 4
    assert content[32:88] == ROOT + KEY.ljust(40, b"\0")


def header_2(magic: bytes) -> bytes:
    fields = struct.pack("<8sI4x16sQII32x", magic, 2, b"p" * 16, 8192, 1, 0)
    return (fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))).ljust(4096, b"\0")


def test_ssd_files_of_format_2_are_kept_and_get_the_current_one(tmp_path: Path) -> None:
    """Their records have zeros where those of format 3 have the form: all slots are plain."""
    (tmp_path / DATA_FILE).write_bytes(header_2(b"FlexSSDd") + bytes(4 * 8192))
    (tmp_path / INDEX_FILE).write_bytes(header_2(b"FlexSSDi") + bytes(4 * 128))
    record = make_records(ROOT, 0, b"", [KEY], np.array([5], np.uint64))
    assert record.tobytes()[28:32] == struct.pack("<HH", len(KEY), 0)
    with (tmp_path / INDEX_FILE).open("r+b") as file:
        SlotIndex([file.fileno()], b"p" * 16).write(np.array([3]), record)
    for _ in range(2):
        opened = pool(tmp_path)
        found = opened.load()
        opened.close()
        assert opened.record_id == b"p" * 16
        assert found[["slot", "checksum", "codec", "filled"]].tolist() == [(3, 5, 0, 0)]
    for name in (DATA_FILE, INDEX_FILE):
        assert (tmp_path / name).read_bytes()[8:12] == struct.pack("<I", 3)


def test_slots_of_format_1_beside_a_current_index_count_as_empty(tmp_path: Path) -> None:
    pool(tmp_path).close()
    with (tmp_path / DATA_FILE).open("r+b") as file:
        file.write(header_1(b"FlexSSDd"))
    opened = pool(tmp_path)
    assert len(opened.load()) == 0
    opened.close()


def test_the_identity_of_a_pool_survives_a_restart(tmp_path: Path) -> None:
    opened = pool(tmp_path)
    opened.adopt(KVIdentity.of("model", "layout"))
    opened.close()
    again = pool(tmp_path)
    assert again.identity == KVIdentity.of("model", "layout")
    assert again.identity is not None
    assert again.identity.text == "model as layout"
    again.close()


def test_directories_that_disagree_on_the_identity_leave_it_unset(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    names = [str(path) for path in paths]
    opened = DiskPool(names, 8192, 4, False)
    opened.adopt(KVIdentity.of("model", "layout"))
    opened.close()
    index = paths[0] / INDEX_FILE
    header = PoolHeader.parse(index.read_bytes()[:4096])
    assert header is not None
    with index.open("r+b") as file:
        other = KVIdentity.of("model", "another")
        file.write(PoolHeader(header.pool_id, 8192, 2, 0, other).page(b"FlexSSDi"))
    again = DiskPool(names, 8192, 4, False)
    assert again.identity is None
    again.close()


# -- remote store --------------------------------------------------------------------------------

OBJECT_2 = bytes.fromhex(
    "466c657843610d0a02000000400000006400000000000000640000000000000042ce50dfff8409c9"
    "9750976239b2ab40fb886f4c010bc45ff131e46cf71f4d97"
)


def test_objects_are_format_2() -> None:
    room = memoryview(bytearray(64))
    BlockCodec().encode(ROOT, KEY, [memoryview(b"x" * 100)], room)
    assert bytes(room) == OBJECT_2
    assert object_name(ROOT, KEY) == f"v2/{ROOT.hex()}/6b/{KEY.hex()}"


def test_objects_of_another_format_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {object_name(ROOT, KEY)}
    for version in (1, 3):
        monkeypatch.setattr(objects, "FORMAT_VERSION", version)
        names.add(object_name(ROOT, KEY))
    assert len(names) == 3


# -- traces --------------------------------------------------------------------------------------


def test_traces_are_format_4_and_older_readers_are_told(tmp_path: Path) -> None:
    tiers = World().cache.tiers
    config = CacheConfig(num_cpu_blocks=1, trace_dir=str(tmp_path))
    header = make_header(config, tiers, fingerprint="model", block_bytes=4096)
    Tracer(config, header).close()
    [file] = tmp_path.iterdir()
    assert file.read_bytes().startswith(b'{"format":4,')
    assert RecordedTrace([file]).header.format == 4
    ops = "H2D D2H DISK2H H2DISK PEER2H REMOTE2H H2REMOTE DISK2D D2DISK COMMIT"
    assert [kind.value for kind in OpKind] == ops.split()


def test_traces_of_format_1_do_not_name_it_and_are_read(tmp_path: Path) -> None:
    file = tmp_path / "older.jsonl"
    file.write_text('{"block_bytes":1,"tokens_per_block":1}\n'
                    '{"type":"clear","time":1,"num_blocks":3}\n')  # fmt: skip
    trace = RecordedTrace([file])
    assert trace.header.format == 1
    assert len(list(trace.records())) == 1


# -- keys ----------------------------------------------------------------------------------------


def test_the_same_model_layout_and_namespace_have_the_same_root_on_every_host() -> None:
    keys = EngineBlockKeys(make_root("model", ["tenant"], ENGINE_KEYS), [b"k"], 1)
    assert keys.root.hex() == "89c7022ab527c441c0ae69401cc3ff6e"
    LayoutRoots(digest("layout")).place(keys)
    assert keys.root.hex() == "9b5506e8525f19bce80469401cc3ff6e"


def test_a_root_depends_on_the_layout_and_is_placed_once() -> None:
    prompt = EngineBlockKeys(make_root("model", [], ENGINE_KEYS), [b"k"], 1)
    found = set()
    for layout in ("one", "another", "one"):
        roots = LayoutRoots(digest(layout))
        roots.place(prompt)
        found.add(prompt.root)
        roots.place(prompt)
        found.add(prompt.root)
    assert len(found) == 2
    LayoutRoots().place(prompt)
    assert prompt.root == prompt.prompt_root


def test_the_units_of_a_tail_are_named_by_its_block_their_count_and_number() -> None:
    assert [name.hex() for name in tail_keys(BlockKey(b"key"), 2)] == [
        "bc308a0111d71226cd23858858c801da", "9af4989e74b6b0c94403a858af1a3e3f",
    ]  # fmt: skip
    assert tail_keys(BlockKey(b"key"), 1)[0].hex() == "0721d6aace86a201f51710e91255aa05"
    records = make_records(ROOT, TAIL_FIRST, KEY, tail_keys(BlockKey(KEY), 2), np.zeros(2, "<u8"))
    assert records["position"].tolist() == [2**31, 2**31 + 1]


def test_the_fingerprint_of_a_model_does_not_change() -> None:
    model = ModelConfig("m", 2, 4, 64, torch.bfloat16, tp_size=2)
    assert model.fingerprint(16) == (
        "m|bfloat16|mha|layers=2|heads=4|head=64|tp=2|block=16|layout=v1"
    )
    groups = KVGroup("full", 16), KVGroup("window", 16, 64, ("a", "b")), KVGroup("state", 16)
    grouped = ModelConfig("m", 2, 4, 64, torch.bfloat16, groups=groups).fingerprint(16)
    assert grouped.endswith("|layout=v1|groups=full:16,window:16:64:c60f8ba575c1ad36,state:16")
    staged = replace(model, tp_size=4, pp_size=3, cp_size=2, kv_replicas=2, sized_by_ranks=True)
    assert staged.fingerprint(16) == (
        "m|bfloat16|mha|layers=2|heads=4|head=64|tp=4,pp=3,cp=2,replicas=2|block=16|layout=v1"
    )
    latent = replace(staged, use_mla=True, kv_replicas=None)  # the same for any number of ranks
    assert latent.fingerprint(16) == (
        "m|bfloat16|mla|layers=2|heads=4|head=64|tp=1,pp=3,cp=2|block=16|layout=v1"
    )


def test_the_layout_of_a_block_does_not_change() -> None:
    layouts = ShardLayouts(2)
    for shard, signature in enumerate(("one", "one", "a|b")):
        layouts.set(shard % 2, signature, is_first=False)
        if shard == 1:
            assert layouts.whole == "one"
    assert layouts.whole == '["a|b", "one"]'


# -- protocol ------------------------------------------------------------------------------------

RANK_2 = (
    b"\x86\xa4type\xa9HelloRank\xa6engine\xa1e\xa7tp_rank\x00\xa6client\xa1c\xa3pid\x02"
    b"\xa7version\x02"
)
RANK_3 = RANK_2.replace(b"\xa7version\x02", b"\xa7version\x03")
ENGINE_2 = (
    b"\x88\xa4type\xabHelloEngine\xa6engine\xa1e\xa6client\xa1c\xa3pid\x01\xa5model\x88"
    b"\xa8model_id\xa1m\xaanum_layers\x01\xacnum_kv_heads\x01\xa9head_size\x08\xa5dtype\xa5uint8"
    b"\xa7use_mla\xc2\xa7tp_size\x01\xb0tokens_per_block\x10\xa5calls\xc4\x05calls"
    b"\xaascratch_fd\xff\xa7version\x02"
)


def answers(frame: bytes) -> list[Any]:
    def never(model: ModelConfig, tokens_per_block: int, shards: Shards) -> Any:
        raise AssertionError("no store is made for a client of another version")

    config = CacheConfig(num_cpu_blocks=1)
    state = ServerState(config, Reactor(), Observers(config), never)
    hub = Hub(state, lambda: SERVER_STATS)
    hub.take(b"client", [frame], 1.0)
    return [message for _, message in hub.outbox.take().to_peers]


def greeting(kind: str, version: int) -> bytes:
    """Make a greeting of a version whose other fields are unknown here."""
    return msgspec.msgpack.encode({"type": kind, "place": ["new", 1], "version": version})


NEWER = PROTOCOL_VERSION + 1


@pytest.mark.parametrize(
    ("frame", "version"),
    [
        (RANK_2, 2),
        (RANK_3, 3),
        (ENGINE_2, 2),
        (greeting("HelloRank", NEWER), NEWER),
        (greeting("HelloEngine", NEWER), NEWER),
        (greeting("HelloSomething", NEWER), NEWER),
    ],
)
def test_a_client_of_another_version_is_refused_for_good_with_both_versions_named(
    frame: bytes, version: int
) -> None:
    [refused] = answers(frame)
    assert isinstance(refused, Refused)
    assert refused.final
    assert f"protocol {version}" in refused.reason
    assert f"the server {PROTOCOL_VERSION}" in refused.reason


def test_the_refusal_is_read_by_clients_of_every_version() -> None:
    encoded = msgspec.msgpack.encode(Refused("why"))
    assert msgspec.msgpack.decode(encoded) == {"type": "Refused", "reason": "why", "final": True}


# -- KV events -------------------------------------------------------------------------------------


def test_snapshots_of_kv_events_have_the_mark_fe() -> None:
    assert pack_request(5) == bytes.fromhex("fe00000000000005")
    assert cursor_of(int.from_bytes(pack_request(5), "big")) == 5
    page = Page(b"publishr", 7, 9, b"batch")
    expected = bytes.fromhex("94c4087075626c697368720709c4056261746368")
    assert msgspec.msgpack.encode(page) == expected
    assert msgspec.msgpack.decode(expected, type=Page) == page


@pytest.mark.parametrize("number", [0, 0xFDFF_FFFF_FFFF_FFFF, 0xFF00_0000_0000_0000])
def test_other_requests_are_not_taken_for_snapshots(number: int) -> None:
    assert cursor_of(number) is None
