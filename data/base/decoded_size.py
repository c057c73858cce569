"""Limits on the memory that a file may take once it is decoded, checked before that memory is allocated.

A file of three megabytes can decompress to any number of gigabytes. Each reader computes the decoded size from the
file's header, refuses a file above the limit, and reads no more bytes than the header states. The configuration key
``data.largest_mb`` raises the limit.
"""

from functools import cache

from polyclinic.common.system.resources import measure_physical_memory, read_container_memory_limit

DEFAULT_LARGEST_MB = 256
"""Default limit in MiB for one decoded picture, with the memory of its decoder: 2^26 pixels of 4 bytes (Pillow's
colour), or 2^27 pixels of 16-bit grey. The largest medical pictures, scanned films and mammograms, take half of that.
"""
MAX_DECOMPRESSION_FACTOR = 100
"""Largest allowed ratio of decompressed to compressed size of a file with many pictures or lines. Pictures have a ratio
of 1 to 5, text tables of 5 to 60; deflate reaches 1,030 if all bytes are zero."""
MAX_MEMORY_SHARE = 0.75
"""Fraction of the machine's memory that one decoded file may take; the rest is for the program and for training."""


def compute_decoded_file_size_limit(
    file_size: int, largest_mb: int = DEFAULT_LARGEST_MB, *, in_memory: bool = True
) -> int:
    """Return the maximum number of bytes for the decoded content of a table, an npz file or an image volume.

    Args:
        file_size: Size of the file in bytes.
        largest_mb: MiB that are always allowed, even for a very small file.
        in_memory: False for content that is written to the disk in pieces, so that memory sets no limit.
    """
    memory = (
        int(MAX_MEMORY_SHARE * measure_process_memory_limit()) if in_memory else MAX_DECOMPRESSION_FACTOR * file_size
    )
    return max(largest_mb << 20, min(MAX_DECOMPRESSION_FACTOR * file_size, memory))


def refuse_oversized_file(claimed: int, limit: int) -> None:
    """Raise a ``ValueError`` that names both sizes if ``claimed`` bytes of content are more than ``limit``."""
    if claimed > limit:
        raise ValueError(make_oversized_file_message(claimed, limit))


def make_oversized_file_message(claimed: int, limit: int) -> str:
    """Return the error message for content of ``claimed`` bytes if ``limit`` bytes are allowed, without a full stop."""
    return f"its content takes {format_mib(claimed)}, {format_mib(limit)} are allowed; data.largest_mb raises the bound"


def format_mib(size: int) -> str:
    """Format a number of bytes in MiB, rounded up; absurdly large numbers become a power of ten."""
    mebibytes = -(-size >> 20)
    return f"{mebibytes:,} MiB" if mebibytes < 10**9 else f"10^{len(str(mebibytes)) - 1} MiB"


@cache
def measure_process_memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or the container's limit if it is lower."""
    return min(measure_physical_memory(), read_container_memory_limit())
