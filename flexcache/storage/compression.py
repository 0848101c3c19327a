"""Lossless compression of blocks, with the libraries of the extra ``compression``."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from enum import IntEnum

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.storage.pieces import Parts, num_bytes_of, scatter

PACKAGES = {"zstd": "zstandard", "lz4": "lz4"}
"""The package that a compression needs; the extra ``compression`` installs them."""
_ZSTD_LEVEL = 1  # KV hardly compresses: the lowest level gains all there is to gain


class Codec(IntEnum):
    """Codecs, by their number in an object's header and in a slot's record."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2

    @classmethod
    def of(cls, setting: str) -> Codec:
        """Return the codec of a setting: ``none``, ``zstd`` or ``lz4``."""
        return cls[setting.upper()]

    @classmethod
    def numbered(cls, number: int) -> Codec:
        """Return the codec of a slot's record.

        Raises:
            ConfigError: There is none of this number.
        """
        try:
            return cls(number)
        except ValueError:
            raise ConfigError(
                f"ssd_cache_dirs: blocks are packed by codec {number}, which this version does "
                "not know; use the version that wrote them, or clear the directories: flexcache "
                "doctor DIR --clear"
            ) from None


class Compressor(ABC):
    """One codec. Not thread-safe."""

    @abstractmethod
    def compress(self, pieces: Parts) -> bytes:
        """Compress the concatenated pieces into one frame."""

    @abstractmethod
    def decompress(self, frame: bytes, pieces: Parts) -> None:
        """Fill the pieces from a frame of exactly their size.

        Raises:
            ValueError: It is not a frame, or has another size.
        """


class ZstdCompressor(Compressor):
    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise _missing("zstandard") from error
        self._error = zstandard.ZstdError
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, pieces: Parts) -> bytes:
        run = self._compressor.compressobj(size=num_bytes_of(pieces))
        return b"".join([*(run.compress(piece) for piece in pieces), run.flush()])

    def decompress(self, frame: bytes, pieces: Parts) -> None:
        # Read piece by piece: a frame that claims a larger size never gets memory for it.
        try:
            with self._decompressor.stream_reader(io.BytesIO(frame)) as reader:
                for piece in pieces:
                    filled = 0
                    while filled < len(piece):
                        count = reader.readinto(piece[filled:])
                        if not count:
                            raise ValueError("the frame is too short")
                        filled += count
                if reader.read(1):
                    raise ValueError("the frame is too long")
        except self._error as error:
            raise ValueError(str(error)) from None


class Lz4Compressor(Compressor):
    def __init__(self) -> None:
        try:
            import lz4.frame
        except ImportError as error:
            raise _missing("lz4") from error
        self._lz4 = lz4.frame

    def compress(self, pieces: Parts) -> bytes:
        run = self._lz4.LZ4FrameCompressor()
        start = run.begin(source_size=num_bytes_of(pieces))
        return b"".join([start, *(run.compress(piece) for piece in pieces), run.flush()])

    def decompress(self, frame: bytes, pieces: Parts) -> None:
        size = num_bytes_of(pieces)
        try:
            raw = self._lz4.LZ4FrameDecompressor().decompress(frame, max_length=size + 1)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        if len(raw) != size:
            raise ValueError("the frame has another size")
        scatter(memoryview(raw), pieces)


def open_compressor(codec: Codec) -> Compressor:
    """Make the compressor of a codec.

    Raises:
        MissingDependencyError: The codec's library is not installed.
    """
    return {Codec.ZSTD: ZstdCompressor, Codec.LZ4: Lz4Compressor}[codec]()


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{package} is not installed; install the extra: pip install '.[compression]'"
    )
