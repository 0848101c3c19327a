"""Shape of a model's KV cache, and of its groups of layers.

The layers of a KV group live and die together in the engine. A *position* is a multiple of
``CacheConfig.tokens_per_block``, which is a multiple of the block size of every group. To resume a
prompt at a position, an engine needs of

    full       every block before it: the dense part, a block of the cache per position
    window     the blocks that the next token's window reaches into
    chunked    the blocks of the chunk that the next token is in
    state      the one block with the state at the position

All but the first are the position's *tail*. The engine keeps the blocks of all groups in one pool,
so its *physical blocks* have the same size whichever group they belong to:

    two groups, full attention (128 tokens per block) and a window of 200 (256 per block)

    position of 256 tokens          |       1       |       2       |       3       |
    full, 2 blocks per position     |   0   |   1   |   2   |   3   |   4   |   5   |    a unit each
    tail of position 3, window                                      ^ block 2       |    half a unit

torch is never imported here: a server does without it, and starts seconds earlier for that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import xxhash

from flexcache.config.values import reject

if TYPE_CHECKING:
    import torch


GroupKind = Literal["full", "window", "chunked", "state"]


@dataclass(frozen=True)
class KVGroup:
    """Layers that share the blocks of one table in the engine.

    Args:
        kind: What of the past its layers read: all of it, a sliding window, the current chunk, or a
            state that sums it up (Mamba, linear attention).
        tokens_per_block: Tokens of one of its blocks.
        window: Tokens that a token reads, itself included (window), or tokens of a chunk (chunked).
        layers: Names of its layers, which engines that share KV must have in the same groups.
        blocks_per_state: Blocks that make up one state (state). A state may be far larger than a
            block of another group, for which the cache's units would otherwise be too large.
    """

    kind: GroupKind
    tokens_per_block: int
    window: int = 0
    layers: tuple[str, ...] = ()
    blocks_per_state: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(GroupKind):
            raise reject("kind", self.kind, f"must be one of {', '.join(get_args(GroupKind))}")
        if not isinstance(self.tokens_per_block, int) or self.tokens_per_block < 1:
            raise reject("tokens_per_block", self.tokens_per_block, "must be at least 1")
        has_window = self.kind in ("window", "chunked")
        if not isinstance(self.window, int) or (self.window > 0) != has_window:
            allowed = "must be at least 1" if has_window else f"a group of {self.kind} has none"
            raise reject("window", self.window, allowed)
        is_count = isinstance(self.blocks_per_state, int) and self.blocks_per_state >= 1
        if not is_count or (self.blocks_per_state > 1 and self.kind != "state"):
            raise reject("blocks_per_state", self.blocks_per_state, "must be at least 1; of states")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> KVGroup:
        """Read a table of a settings file. Raises `TypeError` for a field that is not one."""
        return cls(**{**table, "layers": tuple(table.get("layers", ()))})

    @property
    def is_dense(self) -> bool:
        return self.kind == "full"

    def first_needed(self, num_tokens: int) -> int:
        """Return the first of the blocks that a prompt needs to resume after ``num_tokens``.

        They reach up to block ``num_tokens // tokens_per_block``, which is not one of them.
        """
        stop = num_tokens // self.tokens_per_block
        if self.kind == "state":
            return max(0, stop - 1)
        if self.kind == "window":
            return max(0, num_tokens - self.window + 1) // self.tokens_per_block
        if self.kind == "chunked":
            return num_tokens // self.window * self.window // self.tokens_per_block
        return 0

    def num_needed(self, num_tokens: int) -> int:
        """Return how many blocks a prompt needs to resume after ``num_tokens``."""
        count = num_tokens // self.tokens_per_block - self.first_needed(num_tokens)
        return count * self.blocks_per_state

    def describe(self) -> str:
        """Name, in readable form, all that must agree for its blocks to be interchangeable."""
        names = "\n".join(self.layers).encode()
        layers = xxhash.xxh3_64_hexdigest(names) if names else ""
        blocks = self.blocks_per_state if self.blocks_per_state > 1 else ""
        parts = (self.kind, self.tokens_per_block, self.window or "", layers, blocks)
        return ":".join(map(str, parts)).rstrip(":")


class UnitShape:
    """How the blocks of several groups fill the cache's units.

    Args:
        groups: In the engine's order.
        tokens_per_position: The cache's block size.

    Attributes:
        dense: Groups whose blocks make up the dense part; may be none.
        sparse: Those whose blocks make up tails; may be none.
        blocks_per_unit: Physical blocks in one unit of the cache.
        dense_blocks: Physical blocks of a position's dense part: as many, or none.

    Raises:
        ConfigError: A position is not whole blocks of every group.
    """

    def __init__(self, groups: Sequence[KVGroup], tokens_per_position: int) -> None:
        for group in groups:
            if tokens_per_position % group.tokens_per_block:
                raise reject(
                    "tokens_per_block", tokens_per_position,
                    f"must be a multiple of {group.tokens_per_block}, the block size of a group",
                )  # fmt: skip
        self.dense = [group for group in groups if group.is_dense]
        self.sparse = [group for group in groups if not group.is_dense]
        self._tokens = tokens_per_position
        self._tail_units: dict[int, int] = {}
        """Results of `tail_units`, by position."""
        sizes = (tokens_per_position // group.tokens_per_block for group in self.dense)
        self.dense_blocks = sum(sizes) if groups else 1
        self.blocks_per_unit = max(1, self.dense_blocks)

    def tail_blocks(self, position: int) -> int:
        """Return the physical blocks in the tail of a position (1, 2, ...)."""
        return sum(group.num_needed(position * self._tokens) for group in self.sparse)

    def tail_units(self, position: int) -> int:
        """Return the units of a position's tail: at least one, so that there is one to find."""
        count = self._tail_units.get(position)
        if count is None:  # a look-up at a remote store asks for a thousand at once
            count = max(1, -(-self.tail_blocks(position) // self.blocks_per_unit))
            self._tail_units[position] = count
        return count

    @property
    def largest_tail_units(self) -> int:
        """Return the units of the largest tail; 0 for a model without tails."""
        if not self.sparse:
            return 0
        longest = max(group.window for group in self.sparse)
        return max(self.tail_units(p) for p in range(1, longest // self._tokens + 2))


LAYOUT_VERSION = 1
"""Increases when FlexCache stores other bytes for the same KV."""

KeyAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "sglang"]
_MAX_NAME_PARTS, _MAX_NAME_LENGTH, _MAX_DIGEST_BYTES = 4, 64, 64


@dataclass(frozen=True)
class EngineKeys:
    """How an engine makes the keys of a prompt's blocks: hashes of its tokens, in a chain.

    Args:
        algorithm: The hash: one of vLLM's ``--prefix-caching-hash-algo``, or SGLang's.
        tokens_per_key: Tokens of one hash. A block of several has the last one's.
        namespace: What the engine's adapter adds to the namespace of each prompt.
        root: What the first hash continues, as vLLM's ``NONE_HASH``.
    """

    algorithm: KeyAlgorithm
    tokens_per_key: int
    namespace: tuple[str, ...]
    root: bytes = b""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(KeyAlgorithm):
            allowed = f"must be one of {', '.join(get_args(KeyAlgorithm))}"
            raise reject("algorithm", self.algorithm, allowed)
        if self.tokens_per_key < 1:
            raise reject("tokens_per_key", self.tokens_per_key, "must be at least 1")
        if len(self.root) > _MAX_DIGEST_BYTES:
            raise reject("root", self.root, f"must have at most {_MAX_DIGEST_BYTES} bytes")
        parts = self.namespace
        if len(parts) > _MAX_NAME_PARTS or any(len(each) > _MAX_NAME_LENGTH for each in parts):
            raise reject("namespace", parts, "must have few and short parts")


_COUNTS = (
    "num_layers", "num_kv_heads", "head_size", "tp_size", "dp_size", "pp_size", "cp_size",
)  # fmt: skip
_OPTIONAL_COUNTS = ("kv_replicas", "store_shards")


@dataclass(frozen=True)
class NamedDtype:
    """A dtype of torch in a process that does without it. Prints as the dtype itself does."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


_DTYPES = {
    name: itemsize
    for itemsize, names in (
        (1, "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"),
        (1, "float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4"),
        (1, "bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"),
        (2, "float16 bfloat16 int16 uint16 bits16"),
        (4, "float32 int32 uint32 qint32 complex32"),
        (8, "float64 int64 uint64 complex64"),
        (16, "complex128"),
    )
    for name in names.split()
}
"""Size of an element of each of torch's dtypes. A table, since importing torch takes seconds: what
an engine says in its greeting must not stop the server's loop for them."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model's KV cache.

    Args:
        model_id: Name of the weights; KV of different models never mixes.
        num_layers: Layers that hold KV.
        num_kv_heads: KV heads of the whole model, over all tensor-parallel ranks.
        head_size: Elements of one head of K (and of V). For MLA the latent size (512 + 64).
        dtype: Element type of the KV cache as the engine allocates it.
        use_mla: One latent vector per token instead of K and V per head, the same on every rank.
        tp_size: Tensor-parallel ranks, each with its share of the heads.
        dp_size: Data-parallel engine ranks.
        pp_size: Pipeline stages, each with its own layers.
        cp_size: Context-parallel ranks beside the tensor-parallel ones.
        kv_replicas: Neighbouring tensor-parallel ranks that hold the same KV. None: as the heads
            divide; MLA holds the same on all.
        sized_by_ranks: Each rank tells the size of its blocks (`KVTPClient.register_kv_caches`),
            and the cache opens when all ranks of an engine have. For KV whose size does not follow
            from the shape: pipeline stages, context parallelism, pages of different size.
        store_shards: Parts of a block of one pipeline stage, by KV heads, as
            `CacheConfig.store_shards` has them. None: what each rank holds is one.
        groups: Groups of layers with tables of their own in the engine, in its order; layers, heads
            and head size are then those of one group. Empty: all layers share one table.
        engine_keys: How the engine makes ``block_keys``, if it gives these. Calls that name a
            prompt by its tokens (`KVManager.lookup` and the like) then find what it has stored.
    """

    model_id: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | NamedDtype
    use_mla: bool = False
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    kv_replicas: int | None = None
    sized_by_ranks: bool = False
    groups: tuple[KVGroup, ...] = ()
    engine_keys: EngineKeys | None = field(default=None, compare=False)
    store_shards: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_id, str) or not self.model_id:
            raise reject("model_id", self.model_id, "must be a non-empty string")
        self._check_counts()
        self._check_types()
        self._check_division()

    def _check_counts(self) -> None:
        optional = (each for each in _OPTIONAL_COUNTS if getattr(self, each) is not None)
        for name in (*_COUNTS, *optional):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise reject(name, value, "must be an integer of at least 1")

    def _check_types(self) -> None:
        torch = sys.modules.get("torch")  # else there is no dtype of it
        if not isinstance(self.dtype, NamedDtype if torch is None else (NamedDtype, torch.dtype)):
            raise reject("dtype", self.dtype, "must be a torch.dtype")
        for name in ("use_mla", "sized_by_ranks"):
            if not isinstance(getattr(self, name), bool):
                raise reject(name, getattr(self, name), "must be True or False")
        are_listed = isinstance(self.groups, (tuple, list))
        if not are_listed or not all(isinstance(group, KVGroup) for group in self.groups):
            raise reject("groups", self.groups, "must be a tuple of KVGroup")

    def _check_division(self) -> None:
        """Raise `ConfigError` unless the ranks can divide the KV so."""
        least, most = sorted((self.num_kv_heads, self.tp_size))
        if not self.use_mla and most % least:
            raise reject(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide evenly over tp_size = {self.tp_size}, or the other way round",
            )
        if self.tp_size % self.num_replicas:
            raise reject("kv_replicas", self.kv_replicas, f"must divide tp_size = {self.tp_size}")
        for name in ("pp_size", "cp_size"):
            if getattr(self, name) > 1 and not self.sized_by_ranks:
                raise reject(name, getattr(self, name), "above 1 needs sized_by_ranks = True")
        self._check_store_shards()

    def _check_store_shards(self) -> None:
        """Raise `ConfigError` unless each rank's KV is whole shards."""
        count, parts = self._shards_by_heads, self.tp_size // self.num_replicas
        if count is None or count == parts:  # nothing is cut
            return
        why = self._why_not_cut
        if why:
            raise reject("store_shards", count, f"must be {parts}, or unset: {why}")
        if self.num_kv_heads % count:
            raise reject("store_shards", count, f"must divide num_kv_heads = {self.num_kv_heads}")
        if count % parts:
            raise reject("store_shards", count, f"must be a multiple of {parts}, the ranks that "
                         "have heads of their own")  # fmt: skip

    @property
    def _why_not_cut(self) -> str:
        """Why a rank's KV is not some heads of every layer; "" if it is."""
        if self.has_states:
            return "the model has states (Mamba, linear attention), which are not cut by heads"
        if self.cp_size > 1 or self.num_replicas != self._usual_replicas:
            return "the ranks divide more than heads (context parallelism, drafts beside stages)"
        return ""

    def in_shards(self, store_shards: int | None) -> ModelConfig:
        """Return it with these `store_shards`, if any are given. Raises `ConfigError`."""
        return self if store_shards is None else replace(self, store_shards=store_shards)

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine. They are numbered by stage, then context, then tensor rank."""
        return self.pp_size * self.cp_size * self.tp_size

    @property
    def num_replicas(self) -> int:
        """Neighbouring ranks that hold the same KV, of which one is stored."""
        return self._usual_replicas if self.kv_replicas is None else self.kv_replicas

    @property
    def _is_alike(self) -> bool:
        """Whether all tensor-parallel ranks hold the same KV."""
        return self.num_replicas == self.tp_size

    @property
    def _usual_replicas(self) -> int:
        return self.tp_size if self.use_mla else max(1, self.tp_size // self.num_kv_heads)

    @property
    def _shards_by_heads(self) -> int | None:
        """``store_shards`` where it has an effect: what all ranks hold alike is one shard."""
        is_one = self.use_mla and not self.has_states
        return None if self._is_alike and (self.tp_size > 1 or is_one) else self.store_shards

    @property
    def shards_per_rank(self) -> int:
        """Parts in which a rank stores what it holds of a block."""
        count = self._shards_by_heads
        return 1 if count is None else count * self.num_replicas // self.tp_size

    @property
    def num_shards(self) -> int:
        """Parts of a block that are stored."""
        return self.num_ranks // self.num_replicas * self.shards_per_rank

    @property
    def token_size_in_bytes_per_rank(self) -> int:
        """KV bytes of one token on one rank, over all layers.

        Raises:
            ConfigError: Only the ranks know (``sized_by_ranks``).
        """
        if self.sized_by_ranks:
            raise reject("sized_by_ranks", True, "leaves the size of a token to the ranks")
        if self.use_mla:
            elements = self.head_size
        else:  # more ranks than heads: heads are replicated, as vLLM does
            elements = 2 * max(1, self.num_kv_heads // self.tp_size) * self.head_size
        return self.num_layers * elements * int(self.dtype.itemsize)

    @property
    def token_size_in_bytes(self) -> int:
        """KV bytes of one token as stored: over all layers and shards. As for one rank."""
        return self.token_size_in_bytes_per_rank * (self.num_ranks // self.num_replicas)

    @property
    def has_tails(self) -> bool:
        """Whether a prompt can be resumed only where a tail is (`KVGroup`)."""
        return any(not group.is_dense for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether a state sums up the past. A hit must then leave the last token to be computed:
        it would be added to the state again."""
        return any(group.kind == "state" for group in self.groups)

    def fingerprint(self, tokens_per_block: int) -> str:
        """Name, in readable form, all that must agree for KV bytes to be interchangeable."""
        attention = "mla" if self.use_mla else "mha"
        groups = ",".join(group.describe() for group in self.groups)
        return (
            f"{self.model_id}|{str(self.dtype).removeprefix('torch.')}|{attention}"
            f"|layers={self.num_layers}|heads={self.num_kv_heads}|head={self.head_size}"
            f"|{self._describe_ranks()}|block={tokens_per_block}|layout=v{LAYOUT_VERSION}"
            + (f"|groups={groups}" if groups else "")
        )

    def _describe_ranks(self) -> str:
        """Name how a block is divided."""
        # Where ranks do not divide the KV, the bytes are those of one rank, whatever their number.
        ranks = "tp=1" if self._is_alike else f"tp={self.tp_size}"
        # That of as many ranks as there are shards: their bytes are the same.
        is_by_heads = bool(self._shards_by_heads) and self.num_replicas == self._usual_replicas
        if is_by_heads:
            ranks = f"tp={self.store_shards}"
        if self.pp_size > 1:
            ranks += f",pp={self.pp_size}"
        if self.cp_size > 1:
            ranks += f",cp={self.cp_size}"
        if not self._is_alike and not is_by_heads and (self.use_mla or self.num_replicas > 1):
            ranks += f",replicas={self.num_replicas}"
        return ranks

    @classmethod
    def from_table(cls, table: Any) -> ModelConfig:
        """Read the table ``model`` of a settings file, where dtype is a name.

        Raises:
            ConfigError: A field is missing, unknown or wrong.
        """
        if not isinstance(table, Mapping):
            raise reject("model", table, "must be a table")
        try:
            groups = tuple(KVGroup.from_table(each) for each in table.get("groups", ()))
            dtype = read_dtype(str(table.get("dtype")))
            return cls(**{**table, "dtype": dtype, "groups": groups})
        except TypeError as error:
            raise reject("model", dict(table), str(error)) from None


def read_dtype(name: str) -> torch.dtype | NamedDtype:
    """Look up torch's dtype of this name; without torch in this process, one like it.

    Raises:
        ConfigError: There is none.
    """
    if name not in _DTYPES:
        raise reject("dtype", name, f"must be one of {', '.join(sorted(_DTYPES))}")
    found: torch.dtype | None = getattr(sys.modules.get("torch"), name, None)
    return NamedDtype(name, _DTYPES[name]) if found is None else found
