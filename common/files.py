"""Writing files so that a reader sees the old content or the new, never a part."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write beside the file, flush to disk where ``durable``, and rename into place.

    Args:
        private: Only its owner may read it, at no instant anybody else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Have the names of a folder's files on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
