"""Names of requests' KV: the weights and the adapter that it is computed with.

A request's KV is stored under the weights that it began with, and not at all if it may be of two:

    the weights changed while it ran          -> the cache refuses it by its generation
    blocks came from vLLM's own cache, which
    has not been reset since they changed     -> mixed
    or has blocks of another adapter of this
    name and path                             -> mixed
    its adapter is not what the ranks loaded  -> mixed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils

from flexcache.errors import InternalError
from flexcache.integration.identity.checkpoint import identify_adapter
from flexcache.integration.identity.files import ANY_TIME, FileDigests
from flexcache.integration.vllm.metadata import AdapterUse

_GpuKey = tuple[Any, ...]
_SEVERAL = ""
"""The digest of no adapter."""


def _gpu_key(adapter: Any) -> _GpuKey:
    """Return what vLLM's hashes of an adapter's blocks have of it: its name, and its path in later
    releases than 0.28."""
    read = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if read is None:  # too many adapters count as one then
        return (adapter.lora_name,)
    return tuple(read(SimpleNamespace(lora_request=adapter)))


class RequestName:
    """What a request's KV is called.

    Attributes:
        weights: Generation of the weights that it began with.
        adapter: Digest of its adapter; empty without one, None if that is unknown.
        is_mixed: Its KV may be of several weights or adapters: it is stored under no name.
        is_confirmed: Whether the ranks have said that they hold its adapter.
    """

    __slots__ = ("_unnamed", "adapter", "is_confirmed", "is_mixed", "request", "weights")

    def __init__(self, request: Any, weights: int, adapter: str | None) -> None:
        self.request = request
        self._unnamed = None if request.lora_request is None else _Unnamed(request)
        self.weights = weights
        self.adapter = adapter
        self.is_mixed = False
        self.is_confirmed = request.lora_request is None

    @property
    def may_store(self) -> bool:
        return not self.is_mixed and self.is_confirmed and self.adapter is not None

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """vLLM's hashes of the request's blocks, but not of its adapter's name and path."""
        assert self._unnamed is not None
        return self._unnamed.hash_blocks()


class Names:
    """The names of all requests of one engine. Used on the scheduler's thread.

    Args:
        generation: Returns the present generation of the weights.
        can_lose_loads: Whether vLLM can be told of any request that what was loaded is of no use.
    """

    def __init__(self, generation: Callable[[], int], can_lose_loads: bool) -> None:
        self._generation = generation
        self._can_lose_loads = can_lose_loads
        self._names: dict[str, RequestName] = {}
        self._loaded: Mapping[int, str] = {}
        """Digest of each adapter that the ranks have loaded, by vLLM's number of it."""
        self._digests = FileDigests(since_ns=ANY_TIME, waits=False)
        self._of_gpu: int | None = None
        """The weights that vLLM's own cached blocks are of; None while it has none."""
        self._adapters_of_gpu: dict[_GpuKey, str] = {}
        """The adapter that those of a name and path are of; `_SEVERAL` if they are of several."""
        self._gpu_keys: dict[int, _GpuKey] = {}
        """What vLLM's hashes have of each adapter that requests have begun with, by its number."""

    def of(self, request: Any) -> RequestName:
        name = self._names.get(request.request_id)
        if name is None:
            adapter = self._find_adapter(request.lora_request)
            name = RequestName(request, self._generation(), adapter)
            name.is_confirmed |= self._is_loaded(request.lora_request, adapter)
            self._names[request.request_id] = name
        return name

    def begins(self, request: Any, num_on_gpu: int) -> RequestName:
        """Name a request that is to be computed from now on, but for the first ``num_on_gpu``
        tokens: vLLM has those. Called again while it waits, and after it was preempted: its name is
        the same object as long as it means the same."""
        name, adapter = self.of(request), self._find_adapter(request.lora_request)
        if (name.weights, name.adapter) != (self._generation(), adapter):
            self._names.pop(request.request_id)
            name = self.of(request)
        if self._of_gpu is None:  # from now on vLLM's cache has blocks
            self._of_gpu = name.weights
        is_other = self._of_gpu != name.weights
        if request.lora_request is not None:
            key = _gpu_key(request.lora_request)
            self._gpu_keys[request.lora_request.lora_int_id] = key
            if adapter is not None:
                self._computes(key, adapter)
            is_other |= self._adapters_of_gpu.get(key) != adapter
        name.is_mixed = bool(num_on_gpu) and is_other
        return name

    def _computes(self, key: _GpuKey, digest: str) -> None:
        """Note that vLLM's cache gets blocks of an adapter. They stay when another is loaded
        from the same path, and vLLM finds them for that one, too."""
        former = self._adapters_of_gpu.get(key, digest)
        self._adapters_of_gpu[key] = digest if former == digest else _SEVERAL

    def may_load(self, request: Any) -> bool:
        """Return whether KV may be loaded for a request: where that cannot be taken back, only of
        an adapter that the ranks have loaded."""
        adapter = request.lora_request
        if adapter is None or self._can_lose_loads:
            return True
        return not _reloads(adapter) and self._is_loaded(adapter, self.of(request).adapter)

    def use_of(self, request: Any) -> AdapterUse | None:
        """Return the adapter that a load is for, if any."""
        adapter, digest = request.lora_request, self.of(request).adapter
        if adapter is None or not digest:
            return None
        return AdapterUse(adapter.lora_int_id, digest, _reloads(adapter), self._can_lose_loads)

    def ended(self, request: Any) -> None:
        self._names.pop(request.request_id, None)

    def gpu_reset(self) -> None:
        """Note that vLLM's own cache is empty."""
        self._of_gpu = None
        self._adapters_of_gpu.clear()
        self._gpu_keys.clear()

    def adapters_loaded(self, digests: Mapping[int, str]) -> None:
        """Take what adapters the last step was computed with."""
        self._loaded = digests
        for number, key in self._gpu_keys.items():  # also of requests that have ended by now
            if number in digests:
                self._computes(key, digests[number])
        for name in self._names.values():
            adapter = name.request.lora_request
            if adapter is not None and adapter.lora_int_id in digests:
                is_it = digests[adapter.lora_int_id] == name.adapter
                name.is_confirmed |= is_it
                name.is_mixed |= not is_it

    def _is_loaded(self, adapter: Any, digest: str | None) -> bool:
        return adapter is not None and self._loaded.get(adapter.lora_int_id) == digest

    def _find_adapter(self, adapter: Any) -> str | None:
        """Return the digest of what the ranks have loaded, or will load."""
        if adapter is None:
            return ""
        loaded = self._loaded.get(adapter.lora_int_id)
        if loaded is not None and not getattr(adapter, "load_inplace", False):
            return loaded or None
        return identify_adapter(adapter.lora_path, self._digests)

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        if self._names:
            raise InternalError(f"ended requests are still named: {list(self._names)}")


class _Unnamed:
    """A request as vLLM would hash it without an adapter."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.lora_request = None
        self.block_hashes: list[bytes] = []
        self._last = b""
        """vLLM's hash of the last block: if it is another, the tokens before it are others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def hash_blocks(self) -> list[bytes]:
        theirs, ours = self._request.block_hashes, self.block_hashes
        if ours and (len(ours) > len(theirs) or theirs[len(ours) - 1] != self._last):
            ours.clear()
        if len(ours) < len(theirs):
            ours.extend(self._request._block_hasher(self))
            del ours[len(theirs) :]
            self._last = theirs[len(ours) - 1]
        return ours


def _reloads(adapter: Any) -> bool:
    """Whether vLLM loads an adapter again that it has loaded."""
    return bool(getattr(adapter, "load_inplace", False))
