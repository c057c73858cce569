"""The memory that a file may take once it is decoded: one rule for every kind of file, applied before memory is taken.

Three megabytes can claim or unpack to any number of gigabytes. A reader works out of a file's head how many bytes its
content takes in memory, stops where these are more than the rule allows, and reads no further than the head has said.
One key, ``data.largest_mb``, raises the limit.
"""

from functools import cache

from common.system.resources import container_limit, physical_memory

LARGEST_MB = 256
"""MiB of one decoded picture: 2^26 pixels of four bytes, which is how Pillow holds colours, and twice as many of grey
of 16 bits. The largest pictures of medicine, scanned films and mammograms, have half of that."""
MOST_GROWTH = 100
"""Bytes in memory for each byte of a file of many pictures or lines. Pictures have 1 to 5, tables of text 5 to 60;
deflate reaches 1,030 with nothing but zeros."""
SHARE_OF_MEMORY = 0.75
"""Part of the machine's memory that one file of many pictures may take; the program and the training have the rest."""


def picture_limit(largest_mb: int = LARGEST_MB) -> int:
    """Return the bytes that one decoded picture may take, including the memory that its decoder needs."""
    return largest_mb << 20


def content_limit(file_size: int, largest_mb: int = LARGEST_MB, *, in_memory: bool = True) -> int:
    """Return the bytes that the content of a file of many pictures or lines may take.

    Args:
        file_size: Size of the file in bytes.
        largest_mb: MiB that the content may take however small the file is.
        in_memory: False for content that goes to the disk piece by piece.
    """
    memory = int(SHARE_OF_MEMORY * available_memory()) if in_memory else MOST_GROWTH * file_size
    return max(largest_mb << 20, min(MOST_GROWTH * file_size, memory))


def refuse_oversized_file(claimed: int, limit: int) -> None:
    """Refuse a file if the size that its head claims is above the limit.

    Raises:
        ValueError: Naming both sizes and the key that raises the limit.
    """
    if claimed > limit:
        raise ValueError(size_problem(claimed, limit))


def size_problem(claimed: int, limit: int) -> str:
    """Return the sentence that says why a file is too large, without a full stop, for an error message."""
    return f"its content takes {format_mib(claimed)}, {format_mib(limit)} are allowed; data.largest_mb raises the bound"


def format_mib(size: int) -> str:
    """Format a number of bytes in MiB, rounded up; a size that no machine has, as a power of ten."""
    mebibytes = -(-size >> 20)
    return f"{mebibytes:,} MiB" if mebibytes < 10**9 else f"10^{len(str(mebibytes)) - 1} MiB"


@cache
def available_memory() -> int:
    """Return the bytes of the machine's memory, or of the part of it that this container may use."""
    return min(physical_memory(), container_limit())
