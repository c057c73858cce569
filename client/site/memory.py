"""Files on a site's disk: its state between rounds ("memory"), which is never sent, and frozen parts of models.

There is one state file for each round. A state is final only after its round has counted at the coordinator. The next
request names the last round that counted. The site continues from the file of that round, and removes later files,
whose replies never arrived or came too late. The file of the round before is kept, because the coordinator may go back
one round.
"""

import bisect
import contextlib
import hashlib
import json
import operator
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.state import FROZEN_PART_MISSING, FrozenPart, build_initial_frozen_part
from polyclinic.common.models.zoo.registry import build_meta_backbone
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.files import remove_temporary_files, write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name
from polyclinic.common.wire.records import Arrays, ModelGroups, make_empty_arrays

NO_GROUPS = ModelGroups()
"""Model groups with no array at all."""


@dataclass(frozen=True)
class SiteRoundState:
    """A site's state ("memory") after a round that it took part in.

    Attributes:
        round: Number of that round; 0 before the first.
        parts: The model groups (of trunk, batch normalisation, head) that never leave the site, after training in that
            round.
        evaluated: The same groups at the beginning of the round, as the site evaluated them.
        evaluated_round: Round after which the site had the groups ``evaluated``: the one before ``round``.
        best: The same groups after the best round so far, ``best_round``.
        best_loss: If each site chooses its own best round: the loss of that round, or 1 - AUROC; otherwise infinite.
        optimizer: State of the optimiser, by ``parameter/key``.
        method_state: Arrays that the method stores, such as the pseudo-labels of FedMLP.
        unsent: Rounding errors of compressed updates so far, which are added to the next update.
    """

    round: int = 0
    parts: ModelGroups = NO_GROUPS
    evaluated: ModelGroups = NO_GROUPS
    evaluated_round: int = -1
    best: ModelGroups = NO_GROUPS
    best_round: int = -1
    best_loss: float = float("inf")
    optimizer: Arrays = field(default_factory=make_empty_arrays)
    method_state: Arrays = field(default_factory=make_empty_arrays)
    unsent: ModelGroups = NO_GROUPS


class LostRoundState(WireError):
    """Raised if a site's stored state after the last round that counted at the coordinator is missing or damaged."""


STORED_ROUNDS = 2
"""Number of rounds of a run with a stored state."""
MAX_STATE_AGE_DAYS = 60
"""The states of a run are removed if the run was not written to for this time."""
MAX_STATE_BYTES = 4 * 10**9
"""Maximum size of the states of all runs except the current one."""
MAX_STORED_RUNS = 100
"""Maximum number of runs with stored states, except the current one."""


def remove_old_run_states(
    memory: Path, run: str, *, days: float = MAX_STATE_AGE_DAYS, max_bytes: int = MAX_STATE_BYTES
) -> None:
    """Remove the stored states of runs that are not likely to be resumed.

    Runs that were not written to for ``days`` are removed. Of the other runs, the latest stay: at most
    :data:`MAX_STORED_RUNS` runs with together at most ``max_bytes``, because a coordinator may begin any number of
    runs. The latest run stays even if it is larger.

    Args:
        memory: Folder with a folder for each run.
        run: The current run, which is always kept and not counted.
    """
    others = [folder for folder in memory.iterdir() if folder.name != run] if memory.is_dir() else []
    bytes_left = max_bytes
    oldest_time = time.time() - days * 86400
    for index, folder in enumerate(sorted(others, key=lambda folder: folder.stat().st_mtime, reverse=True)):
        bytes_left -= sum(path.stat().st_size for path in folder.iterdir())
        is_too_old = folder.stat().st_mtime < oldest_time
        is_too_large = bytes_left < 0 and index > 0
        if is_too_old or is_too_large or index >= MAX_STORED_RUNS:
            shutil.rmtree(folder)


class SiteRoundStateFolder:
    """The folder with a site's stored states of one run, one file for each round.

    Args:
        folder: The folder; its name is the run's name.
        site: The site's name, which each file states; empty to read the files of any site.
        durable: Flush files to disk.
    """

    def __init__(self, folder: Path, site: str = "", *, durable: bool = True) -> None:
        self.folder = folder
        self.durable = durable
        self._origin: dict[str, str | int] = {"run": folder.name, "site": site}

    def read_last_counted_state(
        self, counted: int, *, forget: bool = True, settled: bool = False, expected: bool = False
    ) -> SiteRoundState:
        """Return the site's state after the last round that counted; an empty state if none is stored.

        Args:
            counted: Number of the last round that counted.
            forget: Remove all other states except the one before; False for an evaluation, because it may not be
                decided yet which round counts.
            settled: Accept only a state that :meth:`mark_round_settled` has marked; otherwise return an empty state.
            expected: True if the run stores a state after every round that counted, so that a missing one is an error.

        Raises:
            LostRoundState: If the state is expected and missing, if it is damaged, or if the file's content states
                another run, site or round than its path.
        """
        if forget:
            remove_temporary_files(self.folder)
            current = self._state_file_path(counted)
            paths = sorted(self.folder.glob("round-*.safetensors"))
            last = bisect.bisect_right(paths, current)
            for path in [*paths[: max(last - STORED_ROUNDS, 0)], *paths[last:]]:
                path.unlink()
        path = self._state_file_path(counted)
        name = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
        if not path.exists():
            if expected and counted:
                raise LostRoundState(f"its state after round {counted} is missing: {name}.")
            return SiteRoundState()
        if settled and not self.may_continue_from_round(counted):
            return SiteRoundState()
        try:
            state, origin = parse_round_state(path.read_bytes())
        except (OSError, ValueError) as error:
            raise LostRoundState(f"its state after round {counted} is damaged: {name}: {error}.") from None
        expected_origin = {**self._origin, "round": counted} if origin else {}  # an earlier version stated none
        for fact, value in expected_origin.items():
            stated = origin.get(fact)
            if stated != value and not (fact == "site" and "" in (value, stated)):
                problem = f"its state after round {counted} is that of another {fact}"
                raise LostRoundState(f"{problem}: {name}: {fact} {stated} instead of {value}.")
        return state

    def store_empty_state(self, counted: int) -> None:
        """Store an empty state in place of a lost one, so that the site continues from the coordinator's model."""
        self.store_state_of_round(SiteRoundState(), counted)

    def mark_round_settled(self, server_round: int, state_hash: bytes, agreed: str = "") -> None:
        """Mark a round's state as settled (its sum is unmasked or its cost is charged), for use by later rounds.

        Args:
            state_hash: Result of :meth:`read_round_state_hash` after this training, to detect later changes.
            agreed: Hash of the statements and the sum that the sites of a masked round agreed on; empty without masks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        content = state_hash + agreed.encode()
        write_atomically(self._settled_mark_path(server_round), content, durable=self.durable, private=True)
        for path in sorted(self.folder.glob("opened-*"))[:-STORED_ROUNDS]:
            path.unlink()

    def may_continue_from_round(self, server_round: int) -> bool:
        """Return True if a later round may start from the site's state after round ``server_round``.

        This needs the mark of :meth:`mark_round_settled` on that round, and a state that is unchanged since the mark.
        """
        return self.read_settled_request_hash(server_round) is not None

    def read_settled_request_hash(self, server_round: int) -> str | None:
        """Return the hash ``agreed`` of a round's mark (:meth:`mark_round_settled`); None if there is no valid mark."""
        path = self._settled_mark_path(server_round)
        state_hash = self.read_round_state_hash(server_round)
        content = path.read_bytes() if state_hash and path.exists() else b""
        is_valid = bool(state_hash) and content.startswith(state_hash)
        return content.removeprefix(state_hash).decode() if is_valid else None

    def read_round_state_hash(self, server_round: int) -> bytes:
        """Return the SHA-256 at the beginning of a round's state file; empty without a file."""
        path = self._state_file_path(server_round)
        if not path.exists():
            return b""
        with path.open("rb") as file:
            return file.read(_DIGEST_BYTES)

    def _settled_mark_path(self, server_round: int) -> Path:
        return self.folder / f"opened-{server_round:06d}"

    @property
    def newest_stored_round(self) -> int:
        """Return the last round with a state file; 0 if there is none."""
        names = [path.stem.removeprefix("round-") for path in self.folder.glob("round-*.safetensors")]
        return max(map(int, names), default=0)

    def store_state_of_round(self, state: SiteRoundState, server_round: int | None = None) -> None:
        """Write a site's state to the file of a round.

        The file has the SHA-256 of the rest, and then in safetensors format the state with run, site and round.

        Args:
            server_round: Round of the file; None for the state's own ``round``.
        """
        number = state.round if server_round is None else server_round
        named = dict[str, NDArray[Any]]()
        classes = dict[str, list[str]]()
        for part in (*_MODEL_GROUP_FIELDS, *_ARRAY_FIELDS):
            value = getattr(state, part)
            if isinstance(value, ModelGroups) and value.head is not None:
                classes[part] = list(value.head.class_names)
            for name, array in (value.to_named_arrays() if isinstance(value, ModelGroups) else value).items():
                named[f"{part}/{name}"] = np.asarray(array, order="C")
        facts: dict[str, Any] = dict(zip(_NUMBER_FIELDS, operator.attrgetter(*_NUMBER_FIELDS)(state), strict=True))
        facts |= {"classes": classes, "origin": {**self._origin, "round": number}}
        named[_FACTS_ARRAY] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        content = save(named)
        digest = hashlib.sha256(content).digest()
        write_atomically(self._state_file_path(number), digest + content, durable=self.durable, private=True)

    def _state_file_path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"


_MODEL_GROUP_FIELDS = ("parts", "evaluated", "best", "unsent")
_ARRAY_FIELDS = ("optimizer", "method_state")
_NUMBER_FIELDS = ("round", "evaluated_round", "best_round", "best_loss")
_FACTS_ARRAY = "facts"
_DIGEST_BYTES = hashlib.sha256().digest_size


def parse_round_state(written: bytes) -> tuple[SiteRoundState, dict[str, Any]]:
    """Parse the content of a state file; return the state, and the run, site and round that the file names.

    Raises:
        ValueError: If the content is damaged.
    """
    digest = written[:_DIGEST_BYTES]
    content = written[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("its SHA-256 is not the one that it was written with")
    try:
        arrays = load(content)
        facts: dict[str, Any] = json.loads(arrays.pop(_FACTS_ARRAY).tobytes())
        classes = facts.pop("classes")
        origin = dict(facts.pop("origin", {}))
        parts: dict[str, Any] = {}
        for name in (*_MODEL_GROUP_FIELDS, *_ARRAY_FIELDS):
            parts[name] = {}
        for path, array in arrays.items():
            part, _, name = path.partition("/")
            parts[part][name] = array
        for group in _MODEL_GROUP_FIELDS:
            parts[group] = (
                ModelGroups.from_named_arrays(parts[group], classes.get(group, [])) if parts[group] else NO_GROUPS
            )
        return SiteRoundState(**parts, **facts), origin
    except (SafetensorError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds no memory: {error}") from None


# ---------------------------------------------------------------------- frozen parts of models

MAX_OTHER_WEIGHTS_BYTES = 100_000_000
"""Maximum bytes of a weights file in addition to the backbone, for the head of another task and for names."""
MAX_FROZEN_PARTS = 3
"""Maximum number of stored frozen parts; a run that needs an older one receives it again."""


class FrozenPartFiles:
    """The files of frozen parts of models (frozen backbones) at one site.

    Args:
        folder: Folder with one file ``SHA256.f32`` for each part: little-endian float32 numbers and nothing else.
        weights: Folder of the hospital's weights files, from which a frozen part can also be made; None for no such
            folder.
        durable: Flush files to disk.
    """

    def __init__(self, folder: Path, weights: Path | None, *, durable: bool) -> None:
        self._folder = folder
        self._weights = weights
        self._durable = durable

    def ensure_frozen_part_stored(self, spec: ModelSpec) -> bool:
        """Store a network's frozen part from a weights file of the hospital, unless it is stored already.

        Returns:
            True if the part is stored now; False if no file fits, or if the plan names no frozen part.
        """
        if spec.frozen_sha256 is None:
            return False
        with contextlib.suppress(WireError):  # a damaged one is removed, and sent again
            self.read_frozen_part(spec.frozen_sha256)
            return True
        for path in self._list_candidate_weights_files(spec):
            try:
                part = build_initial_frozen_part(spec.model_copy(update={"weights": str(path)}), 0, Path())
            except BadInput:
                continue  # of another architecture, or damaged
            if part is not None and part.sha256 == spec.frozen_sha256:
                self._write_frozen_part(part)
                return True
        return False

    def find_weights_file(self, spec: ModelSpec, sha256: str) -> Path | None:
        """Return the hospital's own weights file with this SHA-256; None if there is none."""
        for path in self._list_candidate_weights_files(spec):
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    return path
        return None

    def _list_candidate_weights_files(self, spec: ModelSpec) -> list[Path]:
        """Return the hospital's weights files, except those that are far too large for this network."""
        backbone = build_meta_backbone(spec).module
        max_bytes = 2 * sum(4 * tensor.numel() for tensor in backbone.state_dict().values()) + MAX_OTHER_WEIGHTS_BYTES
        files = sorted(self._weights.glob("*.safetensors")) if self._weights else []
        return [path for path in files if path.is_file() and path.stat().st_size <= max_bytes]

    def store_received_frozen_part(self, part: FrozenPart, sha256: str) -> None:
        """Store a frozen part that the coordinator sent.

        Raises:
            WireError: If the part does not have this SHA-256.
        """
        if part.sha256 != sha256:
            raise WireError(f"the frozen part of the model has SHA-256 {part.sha256}, the plan names {sha256}.")
        if not self._frozen_part_path(sha256).is_file():
            self._write_frozen_part(part)

    def read_frozen_part(self, sha256: str) -> FrozenPart:
        """Read the frozen part with this SHA-256.

        Raises:
            WireError: If the part is missing or damaged. A damaged file is removed, so that the coordinator sends it
                again.
        """
        path = self._frozen_part_path(sha256)
        try:
            content = path.read_bytes()
        except OSError:
            raise WireError(f"{FROZEN_PART_MISSING}.") from None
        part = FrozenPart(np.frombuffer(content[: len(content) // 4 * 4], "<f4"))
        if part.sha256 != sha256 or len(content) % 4:
            path.unlink(missing_ok=True)
            raise WireError(f"{FROZEN_PART_MISSING}: its file was damaged.")
        os.utime(path)  # marks the file as used, because the oldest files are removed
        return part

    def _write_frozen_part(self, part: FrozenPart) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = part.values.astype("<f4", copy=False).tobytes()
        write_atomically(self._frozen_part_path(part.sha256), content, durable=self._durable)
        parts = sorted(self._folder.glob("*.f32"), key=lambda path: path.stat().st_mtime)
        for old in parts[:-MAX_FROZEN_PARTS]:
            old.unlink(missing_ok=True)

    def _frozen_part_path(self, sha256: str) -> Path:
        return join_plain_name(self._folder, HashName(sha256), ".f32")
