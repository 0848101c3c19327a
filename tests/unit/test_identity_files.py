"""Identity of checkpoints and adapters: every change of what an engine loads makes another."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flexcache.integration import file_digests as files
from flexcache.integration.checkpoint import identify_adapter, identify_checkpoint
from flexcache.integration.file_digests import ANY_TIME, FileDigests, NotKeptError

CONFIG = {"hidden_size": 64, "transformers_version": "5.1", "torch_dtype": "bfloat16"}
COMMIT = "0123456789" * 4
LATER = "abcdef0123" * 4


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    (path / "part").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(random.Random(1).randbytes(3_000_000))
    (path / "part" / "more.safetensors").write_bytes(b"more")
    (path / "modeling.py").write_text("scale = 1")
    (path / "tokenizer.json").write_text("{}")
    return path


def read(path: Path | str, store: Path, trusts_code: bool = True, **more: str) -> tuple[str, str]:
    """Return what tells versions apart, and why nothing does."""
    digests = FileDigests(since_ns=ANY_TIME, store=store)
    parts = dict(identify_checkpoint(str(path), None, digests, trusts_code=trusts_code, **more))
    return parts.get("checkpoint") or parts.get("revision") or "", digests.problem or ""


@pytest.fixture
def hashing(store: Path) -> Iterator[Path]:
    """Have another process hash for ever."""
    store.parent.mkdir()
    with store.open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        yield store


def change_a_few_bytes(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"\1" * 8)


CHANGES: dict[str, Callable[[Path], object]] = {
    "bytes": change_a_few_bytes,
    "subdirectory": lambda path: (path / "part" / "more.safetensors").write_bytes(b"moro"),
    "code": lambda path: (path / "modeling.py").write_text("scale = 2"),
    "config": lambda path: (path / "config.json").write_text('{"hidden_size": 65}'),
    "another file": lambda path: (path / "extra.safetensors").write_bytes(b""),
    "renamed": lambda path: (path / "part").rename(path / "part2"),
    "removed": lambda path: (path / "part" / "more.safetensors").unlink(),
    "mtime set back": lambda path: (
        change_a_few_bytes(path), os.utime(path / "model.safetensors", (1, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_loaded_makes_another_checkpoint(
    name: str, checkpoint: Path, store: Path
) -> None:
    before, problem = read(checkpoint, store)
    assert before
    assert not problem
    CHANGES[name](checkpoint)
    assert read(checkpoint, store)[0] not in ("", before)


def test_a_change_of_8_kib_anywhere_in_a_large_file_is_seen(tmp_path: Path, store: Path) -> None:
    file, size, random_ = tmp_path / "model.safetensors", 16 << 20, random.Random(3)
    with file.open("wb") as stream:
        stream.truncate(size)

    def content() -> str:
        return FileDigests(since_ns=ANY_TIME, store=store).of(file)

    before, seen = content(), set()
    with file.open("r+b") as stream:
        for _ in range(65):
            offset = random_.randrange(size - 8192)
            os.pwrite(stream.fileno(), random_.randbytes(8192), offset)
            seen.add(content())
            os.pwrite(stream.fileno(), bytes(8192), offset)
    assert len(seen - {before}) == 65
    assert content() == before


def test_embeddings_of_new_tokens_make_another_checkpoint(checkpoint: Path, store: Path) -> None:
    """The rest is frozen while they are trained."""
    weights = {
        "model.embed_tokens.weight": torch.zeros(4096, 256, dtype=torch.bfloat16),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(512, 256, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(4096, 256, dtype=torch.bfloat16),
    }
    file = checkpoint / "model.safetensors"
    save_file(weights, file)
    found = [read(checkpoint, store)[0]]
    weights["model.embed_tokens.weight"][2000:2040] = 0.5
    save_file(weights, file)
    found.append(read(checkpoint, store)[0])
    weights["model.layers.0.self_attn.k_proj.weight"][300, 7] = 0.5
    save_file(weights, file)
    found.append(read(checkpoint, store)[0])
    assert len({*found}) == 3


def test_what_changes_no_number_keeps_the_checkpoint(
    checkpoint: Path, tmp_path: Path, store: Path
) -> None:
    before = read(checkpoint, store, trusts_code=False)
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "6.0"}))
    (checkpoint / "tokenizer.json").write_text('{"a": 1}')
    (checkpoint / "modeling.py").write_text("not trusted")
    (checkpoint / "checkpoint-500").mkdir()
    (checkpoint / "checkpoint-500" / "model.safetensors").write_bytes(b"a trainer's")
    assert read(checkpoint, store, trusts_code=False) == before
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    assert read(copied, tmp_path / "another host's", trusts_code=False) == before


def test_no_byte_is_read_again(checkpoint: Path, store: Path) -> None:
    for file in checkpoint.rglob("*.*"):
        os.utime(file, (1, 1))
    time.sleep(2.1)  # what changed just now is not kept: nothing else makes a file old
    first = read(checkpoint, store)
    kept = FileDigests(may_read=False, since_ns=ANY_TIME, store=store)
    parts = dict(identify_checkpoint(str(checkpoint), None, kept, trusts_code=True))
    assert parts["checkpoint"] == first[0]


def test_a_digest_of_a_file_that_changed_just_now_is_not_kept(
    checkpoint: Path, store: Path
) -> None:
    change_a_few_bytes(checkpoint)
    read(checkpoint, store)
    with pytest.raises(NotKeptError):
        FileDigests(may_read=False, since_ns=ANY_TIME, store=store).of(
            checkpoint / "model.safetensors"
        )


def test_a_file_that_changed_since_the_engine_began_is_of_unknown_content(
    checkpoint: Path, store: Path
) -> None:
    digests = FileDigests(since_ns=time.time_ns() - 60 * 10**9, store=store)
    assert "checkpoint" not in dict(identify_checkpoint(str(checkpoint), None, digests))
    assert "changed after" in (digests.problem or "")


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    """A file of before is known to it, one that it writes itself is not."""
    (tmp_path / "before").write_text("x")
    time.sleep(0.05)  # the clock that tells when processes began has ticks of 10 ms
    code = f"""
from pathlib import Path
from flexcache.integration.file_digests import FileDigests, UnknownContentError
digests = FileDigests(store=Path({str(tmp_path / "digests")!r}))
print(len(digests.of(Path({str(tmp_path / "before")!r}))))
Path({str(tmp_path / "after")!r}).write_text("x")
try:
    digests.of(Path({str(tmp_path / "after")!r}))
except UnknownContentError:
    print("unknown")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["32", "unknown"]


@pytest.mark.parametrize("damage", ["cut", "another format", "writable by others", "a link"])
def test_a_store_that_cannot_be_trusted_is_ignored(
    damage: str, checkpoint: Path, store: Path
) -> None:
    expected = read(checkpoint, store)
    store.parent.mkdir(exist_ok=True)
    if damage == "cut":
        store.write_bytes(store.read_bytes()[:-5] if store.exists() else b"{")
    elif damage == "another format":
        store.write_text('{"format": "another", "digests": []}')
    elif damage == "writable by others":
        store.touch()
        store.chmod(0o666)
    else:
        store.unlink(missing_ok=True)
        store.symlink_to(checkpoint / "config.json")
    assert read(checkpoint, store) == expected


def make_snapshot(
    tmp_path: Path,
    commit: str = COMMIT,
    only: tuple[str, ...] = ("model.safetensors", "config.json"),
) -> Path:
    """Make a model as the hub's cache keeps it: files named by their hashes, and links to them."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    large, small = commit.encode() * 1000, b"{}"
    names = {
        "model.safetensors": (large, hashlib.sha256(large).hexdigest()),
        "config.json": (small, hashlib.sha1(b"blob 2\0" + small).hexdigest()),
    }
    for name, (content, digest) in names.items():
        if name not in only:
            continue
        (blobs / digest).write_bytes(content)
        (snapshot / name).symlink_to(blobs / digest)
    return snapshot


def test_a_snapshot_is_its_commit_while_its_files_are_what_was_fetched(
    tmp_path: Path, store: Path
) -> None:
    snapshot = make_snapshot(tmp_path)
    assert read(snapshot, store) == (COMMIT, "")
    digests = FileDigests(since_ns=ANY_TIME, store=store)
    assert next(identify_checkpoint(str(snapshot), None, digests)) == ("model", "org/name")
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(b"edited")
    edited, problem = read(snapshot, store)
    assert edited not in ("", COMMIT)
    assert not problem
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"put in its place")
    assert read(snapshot, store)[0] not in ("", COMMIT, edited)


def test_a_snapshot_that_the_engine_itself_fetched_is_its_commit(
    tmp_path: Path, store: Path
) -> None:
    snapshot = make_snapshot(tmp_path)
    digests = FileDigests(since_ns=0, store=store)  # the engine began before the files came
    parts = dict(identify_checkpoint(str(snapshot), None, digests))
    assert (parts["revision"], digests.problem) == (COMMIT, None)
    (snapshot / "model.safetensors").resolve().write_bytes(b"edited")
    digests = FileDigests(since_ns=0, store=store)
    assert "revision" not in dict(identify_checkpoint(str(snapshot), None, digests))
    assert digests.problem


def point(cache: Path, commit: str) -> None:
    """Move the branch main, as the hub's library does."""
    branch = cache / "models--org--name" / "refs" / "main"
    branch.parent.mkdir(exist_ok=True)
    branch.with_name("tmp").write_text(commit)
    branch.with_name("tmp").replace(branch)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache: a model of one commit, which is the branch main."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    make_snapshot(cache)
    point(cache, COMMIT)
    return cache


def test_a_branch_that_another_process_moves_is_not_what_was_loaded(hub: Path, store: Path) -> None:
    assert read("org/name", store) == (COMMIT, "")
    make_snapshot(hub, LATER)
    point(hub, LATER)
    digests = FileDigests(since_ns=time.time_ns() - 60 * 10**9, store=store)  # loaded COMMIT
    parts = dict(identify_checkpoint("org/name", None, digests))
    assert "revision" not in parts, parts
    assert "changed after" in (digests.problem or "")
    assert read("org/name", store) == (LATER, "")  # one that began since


def test_a_branch_that_the_engine_itself_made_is_what_was_loaded(hub: Path, store: Path) -> None:
    digests = FileDigests(since_ns=0, store=store)
    parts = dict(identify_checkpoint("org/name", None, digests))
    assert (parts["revision"], digests.problem) == (COMMIT, None)


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_branch_that_cannot_be_moved_tells_nothing_once_there_are_two_commits(
    is_offline: bool, hub: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_snapshot(hub, LATER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert read("org/name", store)[0] == (COMMIT if is_offline else "")


def test_weights_may_be_kept_apart_from_the_settings(
    hub: Path, tmp_path: Path, store: Path
) -> None:
    """As vLLM does with ``--download-dir``."""
    download_dir = tmp_path / "weights"
    weights = make_snapshot(download_dir, only=("model.safetensors",))
    point(download_dir, COMMIT)
    assert read("org/name", store, download_dir=str(download_dir)) == (COMMIT, "")
    (weights / "model.safetensors").resolve().write_bytes(b"edited")
    edited, problem = read("org/name", store, download_dir=str(download_dir))
    assert edited not in ("", COMMIT)
    assert not problem
    point(hub, LATER)
    make_snapshot(hub, LATER)
    found, problem = read("org/name", store, download_dir=str(download_dir))
    assert not found
    assert "two commits" in problem


@pytest.mark.parametrize("variable", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_what_comes_from_modelscope_is_not_looked_for_in_the_hubs_cache(
    variable: str, hub: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "True")
    found, problem = read("org/name", store)
    assert not found
    assert "ModelScope" in problem
    adapter = make_snapshot(hub, LATER)
    point(hub, LATER)
    (adapter / "adapter_config.json").write_text("{}")
    assert identify_adapter("org/name", FileDigests(since_ns=ANY_TIME, store=store)) is None
    assert read(adapter, store)[0]  # a path is what it is


@pytest.mark.parametrize("name", ["s3://bucket/model", "gs://bucket/model", "org/never-fetched"])
def test_what_cannot_be_read_is_of_unknown_content(name: str, tmp_path: Path, store: Path) -> None:
    found, problem = read(name, store, download_dir=str(tmp_path))
    assert not found
    assert name in problem


def test_a_commit_names_what_was_not_found_here(store: Path, tmp_path: Path) -> None:
    digests = FileDigests(store=store)
    parts = dict(
        identify_checkpoint("org/never-fetched", COMMIT, digests, download_dir=str(tmp_path))
    )
    assert parts["revision"] == COMMIT
    assert digests.problem is None


def test_an_adapter_is_its_content_wherever_it_is(tmp_path: Path, store: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    digests = FileDigests(since_ns=ANY_TIME, store=store)
    first = identify_adapter(str(adapter), digests)
    moved = shutil.copytree(adapter, tmp_path / "moved")
    assert identify_adapter(str(moved), digests) == first
    (adapter / "README.md").write_text("no part of it")
    assert identify_adapter(str(adapter), digests) == first
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert identify_adapter(str(adapter), digests) != first
    (moved / "adapter_config.json").write_text('{"r": 8}')
    assert identify_adapter(str(moved), digests) != first
    assert identify_adapter(str(tmp_path / "nowhere"), digests) is None


def test_an_engines_own_thread_does_not_wait_for_another_process_that_hashes(
    checkpoint: Path, hashing: Path
) -> None:
    digests = FileDigests(since_ns=ANY_TIME, store=hashing, waits=False)
    assert digests.of(checkpoint / "model.safetensors")


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_digest_that_cannot_be_kept_is_known_to_this_process(
    is_locked: bool, checkpoint: Path, hashing: Path, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    store = hashing if is_locked else tmp_path / "a file" / "digests"
    file = checkpoint / "model.safetensors"
    digests = FileDigests(since_ns=ANY_TIME, store=store, waits=False)
    time.sleep(2.1)  # as above
    first, before = digests.of(file), bytes_read()
    assert digests.of(file) == first
    assert bytes_read() - before < file.stat().st_size // 2


def bytes_read() -> int:
    """Return how much this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_file_that_is_stamped_by_a_clock_ahead_of_this_ones_is_not_read_for_ever(
    checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now_ns = checkpoint / "model.safetensors", time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    digests = FileDigests(since_ns=ANY_TIME, store=store)
    first = digests.of(file)
    time.sleep(2.1)
    assert digests.of(file) == first
    before = bytes_read()
    assert digests.of(file) == first
    assert bytes_read() - before < file.stat().st_size // 2


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_files_of_images_with_one_time_for_all_are_told_apart(
    place: str, checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models at one path, mounted one after the other: numbers and times may be the same."""

    def fixed(found: os.stat_result) -> Any:
        same = {"st_dev": 1, "st_ino": 1, "st_mtime_ns": 1, "st_ctime_ns": 1}
        names = ("st_size", "st_uid", "st_mode")
        return SimpleNamespace(**{name: getattr(found, name) for name in names}, **same)

    image = SimpleNamespace(**vars(os))
    image.stat, image.fstat = (lambda file: fixed(os.stat(file))), (lambda f: fixed(os.fstat(f)))
    monkeypatch.setattr(files, "os", image)
    file = checkpoint / "model.safetensors"
    first = FileDigests(since_ns=ANY_TIME, store=store).of(file)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek({"start": 100, "middle": size // 2, "end": size - 8}[place])
        stream.write(b"\1" * 8)
    assert FileDigests(since_ns=ANY_TIME, store=store).of(file) != first
