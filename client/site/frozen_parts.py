"""Frozen parts of models on a site's disk, each by its hash: received once, or made from a weights file of its own."""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.models.state import NOT_HERE, FrozenPart, built_frozen
from common.models.zoo.registry import outline
from common.models.zoo.spec import ModelSpec
from common.system.files import write_atomically
from common.wire.errors import WireError

LARGEST_REST = 100_000_000
"""Bytes of a weights file beside the backbone: a classifier of another task, names."""
MOST_KEPT = 3
"""Older ones are removed; a run that still needs one is sent it again."""


class FrozenParts:
    """The frozen parts that one site has.

    Args:
        folder: Where they lie, ``SHA256.f32`` each: little-endian float32 and nothing else.
        weights: Folder for weights files of the hospital's own; a file there saves the transfer. None for none.
        durable: Flush to disk.
    """

    def __init__(self, folder: Path, weights: Path | None, *, durable: bool) -> None:
        self._folder, self._weights, self._durable = folder, weights, durable

    def holds(self, spec: ModelSpec) -> bool:
        """Whether the frozen part of this network is here; one made from a weights file is kept from now on."""
        if spec.frozen_sha256 is None:
            return False
        with contextlib.suppress(WireError):  # a damaged one is removed, and sent again
            self.read(spec.frozen_sha256)
            return True
        for path in self._candidates(spec):
            try:
                made = built_frozen(spec.model_copy(update={"weights": str(path)}), 0, Path())
            except BadInput:
                continue  # of another architecture, or damaged
            if made is not None and made.sha256 == spec.frozen_sha256:
                self._write(made)
                return True
        return False

    def weights_file(self, spec: ModelSpec, sha256: str) -> Path | None:
        """The hospital's own weights file that has this hash; None where there is none."""
        for path in self._candidates(spec):
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    return path
        return None

    def _candidates(self, spec: ModelSpec) -> list[Path]:
        """Weights files of the hospital's that may be of this network: what is far too large is not read."""
        plain = outline(spec.architecture, spec.channels, spec.image_size).module
        most = 2 * sum(4 * tensor.numel() for tensor in plain.state_dict().values()) + LARGEST_REST
        files = sorted(self._weights.glob("*.safetensors")) if self._weights else []
        return [path for path in files if path.is_file() and path.stat().st_size <= most]

    def keep(self, part: FrozenPart, sha256: str) -> None:
        """Write one that was received.

        Raises:
            WireError: If it does not have this hash.
        """
        if part.sha256 != sha256:
            raise WireError(f"the frozen part of the model has SHA-256 {part.sha256}, the plan names {sha256}.")
        if not self._path(sha256).is_file():
            self._write(part)

    def read(self, sha256: str) -> FrozenPart:
        """One that is here.

        Raises:
            WireError: If it is not, or is damaged; it is removed then, so that it can be sent again.
        """
        path = self._path(sha256)
        try:
            content = path.read_bytes()
        except OSError:
            raise WireError(f"{NOT_HERE}.") from None
        part = FrozenPart(np.frombuffer(content[: len(content) // 4 * 4], "<f4"))
        if part.sha256 != sha256 or len(content) % 4:
            path.unlink(missing_ok=True)
            raise WireError(f"{NOT_HERE}: its file was damaged.")
        os.utime(path)  # the newest are kept
        return part

    def _write(self, part: FrozenPart) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = part.values.astype("<f4", copy=False).tobytes()
        write_atomically(self._path(part.sha256), content, durable=self._durable)
        kept = sorted(self._folder.glob("*.f32"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            old.unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.f32"
