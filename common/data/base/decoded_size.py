"""How much memory a file may take once it is decoded: one rule for every kind of file, held before memory is taken.

Three megabytes can claim or unpack to any number of gigabytes. A reader works out of a file's head how many bytes its
content takes in memory, stops where these are more than the rule allows, and reads no further than the head has said.
One key, ``data.largest_mb``, raises the bound.
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
"""Of the machine's memory, for one file of many pictures; the rest is for the program and the training."""


def largest_picture(largest_mb: int = LARGEST_MB) -> int:
    """Return bytes that one decoded picture may take, with what its decoder needs beside it."""
    return largest_mb << 20


def largest_content(size: int, largest_mb: int = LARGEST_MB) -> int:
    """Return bytes that the content of a file of many pictures or lines may take.

    Args:
        size: Of the file in bytes.
        largest_mb: What it may take in any case, in MiB.
    """
    return max(largest_mb << 20, min(MOST_GROWTH * size, int(SHARE_OF_MEMORY * memory_of_machine())))


def refuse_larger(claimed: int, bound: int) -> None:
    """Refuse a file by the size that its head claims.

    Raises:
        ValueError: Naming both sizes and the key that raises the bound.
    """
    if claimed > bound:
        raise ValueError(too_large(claimed, bound))


def too_large(claimed: int, bound: int) -> str:
    """Return the reason for refusing a file, without a stop at its end."""
    return f"its content takes {in_mib(claimed)}, {in_mib(bound)} are allowed; data.largest_mb raises the bound"


def in_mib(size: int) -> str:
    """Return bytes in MiB for a message, rounded up; of sizes that no memory has, the power of ten."""
    mebibytes = -(-size >> 20)
    return f"{mebibytes:,} MiB" if mebibytes < 10**9 else f"10^{len(str(mebibytes)) - 1} MiB"


@cache
def memory_of_machine() -> int:
    """Return bytes of the machine's memory, or of what this container may use of it."""
    return min(physical_memory(), container_limit())
