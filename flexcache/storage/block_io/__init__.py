"""Block I/O on files: one contract, implemented with io_uring and with threads."""

from flexcache.storage.block_io.base import BlockIO, Completion, Direction, Request
from flexcache.storage.block_io.factory import io_uring_problem, open_block_io

__all__ = ["BlockIO", "Completion", "Direction", "Request", "io_uring_problem", "open_block_io"]
