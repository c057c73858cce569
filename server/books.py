"""What a run adds up round by round, and the lines it writes as it goes."""

from dataclasses import dataclass

import numpy as np

from server.run_folder import RunFolder
from strategies.records import RoundRecord, Validation
from strategies.state import FederationState


@dataclass
class Books:
    """Sums over rounds, for the summary; and the round whose validation figures are not known yet.

    Attributes:
        folder: Where lines are written.
        workers: Sites that train at a time.
        train_seconds: Time in which sites computed: the slowest one's, or their sum over the workers if that is longer.
        aggregate_seconds: The coordinator's.
    """

    folder: RunFolder
    workers: int
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    _pending: RoundRecord | None = None

    def note(self, record: RoundRecord, state: FederationState) -> None:
        """Add a round up, and write the one before: only now are its validation figures known."""
        self.close(record.validation, state)
        self._pending = record
        spent = list(record.site_seconds.values())
        self.train_seconds += max(max(spent), sum(spent) / min(self.workers, len(spent)))
        self.aggregate_seconds += record.aggregate_seconds
        for site, reason in record.absent.items():
            self.folder.event("absent", round=record.round, site=site, reason=reason)

    def close(self, validation: Validation, state: FederationState) -> None:
        """Write the pending round's line with the validation figures of the model that it made."""
        record, self._pending = self._pending, None
        if record is None:
            return
        self.folder.round(
            {
                "round": record.round,
                "sites": list(record.sites),
                "absent": dict(record.absent),
                "train_loss": float(np.mean(list(record.train_loss.values()))),
                "validation_loss": validation.mean_loss,
                "validation_auroc": validation.mean_auroc,
                "best": state.best_round == record.round,
                "site_losses": {
                    site: {"train_loss": record.train_loss[site], "validation_loss": validation.loss.get(site)}
                    for site in record.sites
                },
                "seconds": record.seconds,
                "bytes_up": sum(record.bytes_up.values()),
                "bytes_down": sum(record.bytes_down.values()),
            }
        )
