"""Identity of a checkpoint, and of an adapter: the content of all files that an engine loads.

in the hub's cache, as fetched     the commit
any other files                    a digest of them: a path does not identify content
a URL, a name never fetched        unknown, unless the name is a commit's
a branch that moved meanwhile      unknown
a name on ModelScope               unknown
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flexcache.cache.prompt import random_version
from flexcache.config import CacheConfig
from flexcache.integration.file_digests import (
    FileDigests,
    NotKeptError,
    UnknownContentError,
    digest,
    stats_of,
)
from flexcache.logs import log_event

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
"""Path of a model in the hub's cache; offline, vLLM knows the model only by this path."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SETTINGS = ("config.json", "params.json")
_OF_ADAPTER = "adapter_config.json"
_MODELSCOPE = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".tensors"}
_CONFIGS = {
    "config.json", "params.json", "quantize_config.json", "quant_config.json",
    "hf_quant_config.json",
}  # fmt: skip
_NOT_READ = {
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt",
    "generation_config.json", "special_tokens_map.json", "trainer_state.json", "vocab.json",
}  # fmt: skip
"""What a trainer leaves, and what concerns text only: the cache's prompts are token ids."""
_NOT_ENTERED = re.compile(r"\..*|checkpoint-\d+|global_step\d+|__pycache__")
"""A trainer's other checkpoints. An engine that is to serve one is given its own path."""
_GGUF_PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)")


def identify_checkpoint(
    name: str,
    revision: str | None,
    digests: FileDigests,
    *,
    trusts_code: bool = False,
    download_dir: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint's name, and what tells its versions apart. If nothing does, that is
    noted (`FileDigests.problem`).

    Args:
        name: Its name on the hub, or a path.
        revision: Commit, branch or tag, if one is set.
        trusts_code: Whether the engine runs code that comes with the weights.
        download_dir: Where the engine keeps what it fetches from the hub, if not in its cache.

    Raises:
        NotKeptError: Files would have to be read.
    """
    paths = [Path(name)]
    snapshot = _SNAPSHOT.fullmatch(name)
    is_here = paths[0].exists()
    yield "model", snapshot[1].replace("--", "/", 1) if is_here and snapshot is not None else name
    try:
        if not is_here:
            paths = _find_fetched(name, revision, download_dir, digests)
            snapshot = _SNAPSHOT.fullmatch(str(paths[0])) if paths else None
        files = _name_files(paths, trusts_code) if is_here or paths else {}
        if snapshot and files and all(_is_as_fetched(file, digests) for file in files.values()):
            yield "revision", snapshot[2]
        elif files:
            yield "checkpoint", _digest_files(files, digests)
        elif revision is not None and _COMMIT.fullmatch(revision) and "://" not in name:
            yield "revision", revision
        else:
            if revision is not None:
                yield "revision", revision
            digests.note_unknown(f"{name}: its files were not found on this host")
    except UnknownContentError as error:
        digests.note_unknown(str(error))


def identify_adapter(path: str, digests: FileDigests) -> str | None:
    """Return the digest of an adapter, wherever it is; None if it is not here, or unknown.

    Raises:
        NotKeptError: Files would have to be read.
    """
    try:
        files = {file.name: digests.of(file) for file in _files_of_adapter(path)}
    except (OSError, UnknownContentError):
        return None
    return digest(files) if files else None


class LoadedAdapter:
    """An adapter that an engine loads. To be made right before.

    Args:
        path: Where it is loaded from; empty if that is not known.
        name: What to call it while its files are not known; by default, at random.

    Attributes:
        files: What changes if its files do; empty if there are none.
        name: Its digest, once `identify` has found the files that were loaded.
    """

    def __init__(self, path: str, name: str = "") -> None:
        self.name = name or uuid.uuid4().hex
        self.files = _read_stats(path)
        self._path = path

    def identify(self, digests: FileDigests) -> None:
        """Name it by its files, if they are those of before: it has been loaded by now, for which
        the engine may have fetched a later commit from the hub."""
        found = identify_adapter(self._path, digests)
        if found is not None and self.files and self.files == _read_stats(self._path):
            self.name = found


def _read_stats(path: str) -> list[Any]:
    try:
        return stats_of(_files_of_adapter(path))
    except OSError:
        return []


def _files_of_adapter(path: str) -> list[Path]:
    """Return what an engine loads of an adapter, from a directory or from the hub's cache: nothing
    if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    directory = os.path.expanduser(path)
    if not os.path.isdir(directory):
        try:
            found = None if _uses_modelscope() else try_to_load_from_cache(path, _OF_ADAPTER)
        except HFValidationError:
            found = None
        if not isinstance(found, str):
            return []
        directory = os.path.dirname(found)
    files = [f for f in Path(directory).iterdir() if f.name == _OF_ADAPTER or _is_weights(f.name)]
    return sorted(files) if len(files) > 1 else []


def _find_fetched(
    name: str, revision: str | None, download_dir: str | None, digests: FileDigests
) -> list[Path]:
    """Return where the hub's caches have a model: its snapshot in each, of one commit. None if no
    cache has its settings.

    Engines read settings from the hub's cache, and only weights from ``download_dir``.

    Raises:
        UnknownContentError: Which commit the engine has loaded cannot be told.
    """
    from huggingface_hub import constants

    caches = [download_dir or constants.HF_HUB_CACHE, constants.HF_HUB_CACHE]
    found = [_find_snapshot(cache, name, revision, digests) for cache in dict.fromkeys(caches)]
    snapshots = [snapshot for snapshot in found if snapshot is not None]
    if not any((each / file).exists() for each in snapshots for file in _SETTINGS):
        return []
    if len({snapshot.name for snapshot in snapshots}) > 1:
        raise UnknownContentError(
            f"{name}: its settings and what is in download_dir = {download_dir} are of two commits"
        )
    return [] if found[0] is None else snapshots  # without any weights


def _find_snapshot(
    cache: str, name: str, revision: str | None, digests: FileDigests
) -> Path | None:
    """Return the snapshot that a cache of the hub has for a revision; None: the branch ``main``.

    Raises:
        UnknownContentError: Which commit it was when the engine loaded it cannot be told.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if _uses_modelscope():
        raise UnknownContentError(f"{name}: it was fetched from ModelScope, not from the hub")
    try:
        repository = Path(cache, repo_folder_name(repo_id=name, repo_type="model"))
    except HFValidationError:  # not a repository on the hub
        return None
    snapshots, branch = repository / "snapshots", repository / "refs" / (revision or "main")
    try:
        commit = branch.read_text().strip()
        # Another process that uses this cache moves the branch when it fetches a later commit. So
        # the branch says which commit the engine has loaded if it is older than the engine, or if
        # there has been one commit only: then the engine itself may just have fetched it. vLLM
        # fetches before it starts its engine's process; in one process, or if the engine's own
        # start moves the branch, the commit is unknown until the next start. A cache that cannot be
        # written does not say either: its branch stays while the engine loads what the hub names.
        if os.listdir(snapshots) != [commit]:
            if not digests.is_older(branch):
                raise UnknownContentError(f"{branch} changed after the engine's process began")
            if not (os.access(branch.parent, os.W_OK) or constants.HF_HUB_OFFLINE):
                raise UnknownContentError(f"{branch} cannot follow the hub: it is read-only")
    except OSError:  # no branch
        commit = revision or ""
    found = snapshots / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def _uses_modelscope() -> bool:
    """Return whether engines fetch names from ModelScope: what the hub's cache has of the same name
    is not what they load."""
    given = (os.environ.get(name, "") for name in _MODELSCOPE)
    return any(value.strip().lower() in ("true", "1") for value in given)


def _name_files(paths: list[Path], trusts_code: bool) -> dict[str, Path]:
    """Return the files below some paths, by their names there."""
    files: dict[str, Path] = {}
    for number, path in enumerate(paths):
        base = path if path.is_dir() else path.parent
        for file in _files_of(path, trusts_code):
            name = file.relative_to(base).as_posix()
            files[f"{number}/{name}" if number else name] = file
    return files


def _files_of(path: Path, trusts_code: bool) -> Iterator[Path]:
    """Yield the files that an engine may read to compute KV: more, if in doubt, than it does."""
    if path.is_file():
        part = _GGUF_PART.fullmatch(path.name)
        yield from [path] if part is None else sorted(path.parent.glob(f"{part[1]}*{part[2]}"))
        return
    entered: set[str] = set()
    for directory, names, files in os.walk(path, followlinks=True):
        real = os.path.realpath(directory)
        if real in entered:  # a link back up
            names.clear()
            continue
        entered.add(real)
        names[:] = sorted(name for name in names if not _NOT_ENTERED.fullmatch(name))
        yield from (Path(directory, name) for name in sorted(files) if _counts(name, trusts_code))


def _counts(name: str, trusts_code: bool) -> bool:
    if name in _NOT_READ or name.startswith((".", "tokenizer")):
        return False
    suffix = os.path.splitext(name)[1]
    return suffix in _WEIGHTS or suffix == ".json" or (suffix == ".py" and trusts_code)


def _is_weights(name: str) -> bool:
    """Return whether a file beside an adapter's settings is its weights: engines load more than
    those that are named ``adapter_model``."""
    is_weights = os.path.splitext(name)[1] in _WEIGHTS
    return is_weights and name not in _NOT_READ and not name.startswith(".")


def _is_as_fetched(file: Path, digests: FileDigests) -> bool:
    """Return whether a file of a snapshot is what the hub named its blob by: SHA-256 of large
    files, what git calls small ones.

    An engine may fetch the files when it starts, so they may be newer than its process: each is
    complete under its name before it is loaded.
    """
    real = Path(os.path.realpath(file))
    methods = {64: "sha256", 40: "git-sha1"}
    if real.parent.name != "blobs" or len(real.name) not in methods:
        return False
    return digests.of(real, methods[len(real.name)], may_be_new=True) == real.name


def _digest_files(files: dict[str, Path], digests: FileDigests) -> str:
    return digest(
        {
            name: digests.of(file, "config" if file.name in _CONFIGS else "xxh3")
            for name, file in files.items()
        }
    )


logger = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # a small model's first request finds its cache open

ReadId = Callable[[FileDigests], str]


def identify_now(read: ReadId, config: CacheConfig) -> tuple[str, CacheConfig]:
    """Return a model's id, and the settings of its cache; wait until its files are hashed."""
    return _read(read, config, FileDigests())


def when_identified(
    read: ReadId, config: CacheConfig, use: Callable[[str, CacheConfig], None]
) -> bool:
    """Call ``use`` with a model's id and the settings of its cache: at once if all digests of its
    files are kept, else on a thread that reads them. Return whether it was at once.

    Args:
        read: Reads the id. Called again on the thread.
    """
    try:
        found = _read(read, config, FileDigests(may_read=False))
    except NotKeptError as error:
        log_event(
            logger, logging.INFO, "model_files_hashed", first=error,
            effect="the cache opens when they are; their digests are kept for later starts",
        )  # fmt: skip
        thread = threading.Thread(
            target=_read_and_use, args=(read, config, use), name="flexcache-identity", daemon=True
        )
        thread.start()
        thread.join(_PATIENCE_S)
        return False
    use(*found)
    return True


def _read_and_use(
    read: ReadId, config: CacheConfig, use: Callable[[str, CacheConfig], None]
) -> None:
    try:
        use(*identify_now(read, config))
    except Exception:  # the engine must continue without the cache
        log_event(
            logger, logging.ERROR, "cache_not_opened", effect="runs without a cache", exc_info=True
        )


def _read(read: ReadId, config: CacheConfig, digests: FileDigests) -> tuple[str, CacheConfig]:
    model_id = read(digests)
    if digests.problem is None or config.model_version is not None:
        return model_id, config
    log_event(
        logger, logging.WARNING, "weights_not_identified", reason=digests.problem,
        effect="no other engine finds what this one stores, nor does this one after a restart",
        remedy="name the weights: set FLEXCACHE_MODEL_VERSION",
    )  # fmt: skip
    return model_id, dataclasses.replace(config, model_version=random_version())
