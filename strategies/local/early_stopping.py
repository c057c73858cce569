"""Early stopping: the rule that ends training at a hospital or at the coordinator once the loss has settled.

Hassani and Rekik, "UniFed", 2024 (docs/papers.md#unifed-settled). The paper stops when the loss is "nearly unchanged"
over the last epochs; the exact rule is that of the authors' code. That code never loads its checkpoint of the lowest
validation loss; here, as in the paper, the weights of the lowest loss are returned.

A loss that is NaN counts as worse than any number.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class EarlyStopping:
    """The state of the early stopping rule after some epochs of training.

    Attributes:
        patience: Training stops after this many epochs in a row with a loss above the lowest, or after this many slight
            falls of the loss in total.
        tolerance: A fall of the loss by less than this counts as slight.
        cap: The largest number of epochs.
        epochs: Number of epochs so far.
        lowest: The lowest loss so far; infinite before the first epoch.
        best_epoch: The last epoch with the lowest loss, from 0; -1 if every loss so far was NaN.
        worse: Number of epochs in a row, up to now, with a loss above the lowest.
        slight: Number of slight falls so far; a larger fall does not reset the number.

    Raises:
        ValueError: If patience or cap is below 1, or tolerance below 0.
    """

    patience: int
    tolerance: float = 0.01
    cap: int = 200
    epochs: int = 0
    lowest: float = math.inf
    best_epoch: int = -1
    worse: int = 0
    slight: int = 0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.cap < 1:
            raise ValueError(f"patience and cap must be at least 1, got {self.patience} and {self.cap}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be below 0, got {self.tolerance}")

    def after(self, validation_loss: float) -> "EarlyStopping":
        """Return the state after one more epoch; an epoch with a loss equal to the lowest becomes the best epoch."""
        assert not self.stopped
        if not validation_loss <= self.lowest:  # NaN is worse, too
            return replace(self, epochs=self.epochs + 1, worse=self.worse + 1)
        slight = self.slight + (self.lowest - validation_loss < self.tolerance)
        lowest = validation_loss
        epochs = self.epochs + 1
        return replace(self, epochs=epochs, lowest=lowest, best_epoch=self.epochs, worse=0, slight=slight)

    @property
    def stopped(self) -> Literal["", "slight", "early_stop", "cap"]:
        """Return why training has stopped, or an empty string while training continues."""
        if self.slight >= self.patience:
            return "slight"
        if self.worse >= self.patience:
            return "early_stop"
        return "cap" if self.epochs >= self.cap else ""
