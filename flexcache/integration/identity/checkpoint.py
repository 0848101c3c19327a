"""Identity of a checkpoint, and of an adapter: the content of all files that an engine loads.

in the hub's cache, as fetched     the commit
any other files                    a digest of them: a path does not identify content
a URL, a name never fetched        unknown, unless the name is a commit's
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from flexcache.integration.identity.files import FileDigests, UnknownContentError
from flexcache.integration.identity.settings import digest

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
"""Path of a model in the hub's cache; offline, vLLM knows the model only by this path."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
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
    path = Path(name)
    if path.exists():
        snapshot = _SNAPSHOT.fullmatch(name)
        yield "model", name if snapshot is None else snapshot[1].replace("--", "/", 1)
    else:
        yield "model", name
        path = _find_fetched(name, revision, download_dir) or path
        snapshot = _SNAPSHOT.fullmatch(str(path))
    files = list(_files_of(path, trusts_code)) if path.exists() else []
    try:
        if snapshot is not None and files and all(_is_as_fetched(file, digests) for file in files):
            yield "revision", snapshot[2]
        elif files:
            yield "checkpoint", _digest_files(path, files, digests)
        elif revision is not None and _COMMIT.fullmatch(revision) and "://" not in name:
            yield "revision", revision
        else:
            if revision is not None:
                yield "revision", revision
            digests.note_unknown(f"{name}: its files were not found on this host")
    except UnknownContentError as error:
        digests.note_unknown(str(error))


def identify_adapter(path: str, digests: FileDigests) -> str:
    """Digest an adapter, wherever it is.

    Raises:
        UnknownContentError: It has no files, or they change.
        NotKeptError: Files would have to be read.
    """
    return digest({file.name: digests.of(file) for file in adapter_files(path)})


def adapter_files(path: str) -> list[Path]:
    """Return what an engine loads of an adapter.

    Raises:
        UnknownContentError: There is nothing.
    """
    try:
        files = sorted(
            file
            for file in Path(path).iterdir()
            if file.name == "adapter_config.json" or _is_weights(file.name)
        )
    except OSError as error:
        raise UnknownContentError(f"{path}: {error}") from None
    if len(files) < 2:
        raise UnknownContentError(f"{path}: no adapter")
    return files


def find_adapter(path: str) -> str:
    """Return an adapter's directory; of one on the hub, in its cache.

    Raises:
        UnknownContentError: It is not on this host.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    directory = os.path.expanduser(path)
    if os.path.isdir(directory):
        return directory
    try:
        found = try_to_load_from_cache(path, "adapter_config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise UnknownContentError(f"{path}: no such adapter on this host")
    return os.path.dirname(found)


def _find_fetched(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return where the hub's cache has a model, of which ``main`` may be the revision."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        for file in ("config.json", "params.json"):
            found = try_to_load_from_cache(name, file, download_dir, revision)
            if isinstance(found, str):
                return Path(found).parent
    except HFValidationError:  # not a repository on the hub
        pass
    return None


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


def _digest_files(path: Path, files: list[Path], digests: FileDigests) -> str:
    base = path if path.is_dir() else path.parent
    return digest(
        {
            file.relative_to(base).as_posix(): digests.of(
                file, "config" if file.name in _CONFIGS else "xxh3"
            )
            for file in files
        }
    )
