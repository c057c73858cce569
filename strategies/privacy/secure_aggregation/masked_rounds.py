"""A site's record of the rounds that it masked: the sites that masked together, and those whose sum was unmasked.

To *open* a sum is to reveal the shares that unmask it. A round may be requested again, because the coordinator was
killed, or because a malicious coordinator wants another sum. The difference of two sums would show the sites that are
in only one of them. So a repeated round is unmasked for the same sites or not at all. To unmask a sum, two thirds of
the members must help; any two such groups have a site in common, and that site helps with only one of the two sums. So
two sums of one round have the same sites, or no site in common.

The same holds for two rounds, also of different runs, that start from the same model: if training is not random, their
updates are equal.

No record is deleted, because a round without a record could be masked again among fewer sites.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyclinic.common.errors import quote_names
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import RunName, join_plain_name
from polyclinic.strategies.privacy.secure_aggregation.crypto import SecretsError
from polyclinic.strategies.privacy.secure_aggregation.vectors import compute_share_threshold

MAX_STORED_RUNS = 5_000
"""Largest number of stored runs; a malicious coordinator needs a round of training to add one."""


@dataclass(frozen=True)
class MaskedRoundRecord:
    """A site's record of one round that it masked.

    Attributes:
        members: The sites that masked together, sorted; empty before this site has masked.
        opened: The sites whose sum this site helped to unmask by revealing its shares, sorted; empty before that.
        noise: Hash of the data that the site's share of distributed noise was added to; empty for none.
        divisor: Divisor of the site's update; 0 before this site has masked.
    """

    members: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    noise: str = ""
    divisor: int = 0

    def with_masked_members(self, members: Collection[str]) -> "MaskedRoundRecord":
        """Return the record with ``members`` as the sites that masked together.

        Raises:
            SecretsError: If the round was already masked among other sites.
        """
        if self.members not in ((), masking := tuple(sorted(members))):
            raise SecretsError(f"this round was masked among {quote_names(self.members)}, and is among no others")
        return replace(self, members=masking)

    def with_unmasked_survivors(self, survivors: Collection[str]) -> "MaskedRoundRecord":
        """Return the record with ``survivors`` as the sites whose sum this site helps to unmask.

        Raises:
            SecretsError: If the site has already revealed its shares for the sum of other sites.
        """
        if self.opened not in ((), opened := tuple(sorted(survivors))):
            raise SecretsError(f"the sum of {quote_names(self.opened)} was opened in this round, and no other is")
        return replace(self, opened=opened)

    def with_noise_hash(self, drawn_for: str) -> "MaskedRoundRecord":
        """Return the record with the hash of the data that a share of noise is added to.

        Raises:
            SecretsError: If a share was already added to other data in this round; two noisy sums would weaken privacy.
        """
        if self.noise not in ("", drawn_for):
            raise SecretsError("this round was masked with noise before, for another request")
        return replace(self, noise=drawn_for)


def count_needed_survivors(members: int, cohort: int, honest: int = 0) -> int:
    """Return how many sites must answer at every stage of masking; as many shares recover a secret.

    Args:
        members: Number of sites in the round's first attempt. A later attempt has fewer sites, but as many of them may
            be dishonest.
        cohort: Smallest number of sites whose sum a site helps to unmask.
        honest: Number of sites that give the coordinator no secret help; see :func:`compute_share_threshold`.
    """
    return max(compute_share_threshold(members, honest), cohort)


class MaskedRoundStore:
    """Stores a site's masked rounds on its disk, one file for each run.

    Args:
        folder: Folder of the files; None stores nothing, for simulation.
        durable: True to flush to disk.
    """

    def __init__(self, folder: Path | None = None, *, durable: bool = True) -> None:
        self._folder, self._durable = folder, durable

    def read_masked_round(self, run: str, server_round: int, start: str = "") -> MaskedRoundRecord:
        """Return the record of this round, merged with those of all rounds that started from the same model.

        Args:
            start: Hash of the model at the beginning of the round; empty if unknown.

        Raises:
            SecretsError: If these rounds were masked among different sites, or unmasked for different sites.
            ValueError: If a file is damaged, because masking without the record is not safe.
        """
        notes = [self._read_rounds_of_run(run).get(str(server_round), {})]
        if start and self._folder is not None:
            for path in sorted(self._folder.glob("*.json")):
                rounds = self._read_rounds_of_run(path.stem).values()
                notes += [note for note in rounds if start in note.get("starts", ())]
        done = MaskedRoundRecord()
        for note in notes:
            done = done.with_masked_members(note["members"]) if note.get("members") else done
            done = done.with_unmasked_survivors(note["opened"]) if note.get("opened") else done
        divisors = [int(note.get("divisor") or len(note["members"])) for note in notes if note.get("members")]
        return replace(done, noise=str(notes[0].get("noise", "")), divisor=next(iter(divisors), 0))

    def store_masked_round(self, run: str, server_round: int, done: MaskedRoundRecord, start: str = "") -> None:
        """Store the record of a round on disk, before the site answers.

        Args:
            done: The record of the round.
            start: Hash of the model at the beginning of the round; empty if unknown.

        Raises:
            SecretsError: If the maximum number of stored runs is reached.
        """
        if self._folder is None:
            return
        path = self._find_file_of_run(run)
        before = self._read_rounds_of_run(run)
        starts = sorted({*before.get(str(server_round), {}).get("starts", ()), start} - {""})
        named = {"members": list(done.members), "opened": list(done.opened), "divisor": done.divisor}
        noted = {**named, "starts": starts, "noise": done.noise}
        if before.get(str(server_round)) == noted:
            return
        if not path.exists() and len(list(self._folder.glob("*.json"))) >= MAX_STORED_RUNS:
            kept = f"it has masked in {MAX_STORED_RUNS:,} runs; it forgets none of them"
            raise SecretsError(f"{kept}, and masks in no further run")
        content = json.dumps({**before, str(server_round): noted}).encode()
        write_atomically(path, content, durable=self._durable, private=True)

    def _read_rounds_of_run(self, run: str) -> dict[str, Any]:
        if self._folder is None or not self._find_file_of_run(run).exists():
            return {}
        rounds = json.loads(self._find_file_of_run(run).read_bytes())
        if not isinstance(rounds, dict):
            raise ValueError(f"{self._find_file_of_run(run).name} holds no masked rounds")
        return rounds

    def _find_file_of_run(self, run: str) -> Path:
        assert self._folder is not None, "checked before"
        return join_plain_name(self._folder, RunName(run), ".json")
