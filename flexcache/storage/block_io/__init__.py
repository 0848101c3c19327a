"""Block I/O on files: one contract, io_uring or threads behind it."""

from flexcache.storage.block_io.base import BlockIO, Completion, Direction, Request
from flexcache.storage.block_io.factory import io_uring_problem, open_block_io

__all__ = ["BlockIO", "Completion", "Direction", "Request", "io_uring_problem", "open_block_io"]
