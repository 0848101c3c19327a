"""Alignment that direct I/O and page tables require."""

PAGE_BYTES = 4096


def align_up(size: int, alignment: int = PAGE_BYTES) -> int:
    return -(-size // alignment) * alignment
