"""When a hospital's or the server's training has settled.

Hassani and Rekik, "UniFed", 2024 (specs 2.4, step 4). The text's rule, "nearly unchanged" over the last epochs,
is taken as the authors' code has it. Which weights are kept departs from the code, which writes a checkpoint at the
lowest validation loss and never loads it: by the paper, and here, those of the lowest loss are returned.

A loss that is NaN counts as worse than any number.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class LossHistory:
    """How a validation loss went so far.

    Attributes:
        lowest: Lowest loss; infinite before the first.
        best: Index of the last of the lowest losses, from 0; -1 for none.
        seen: Losses seen.
        worse: Losses in a row above the lowest, up to now.
    """

    lowest: float = math.inf
    best: int = -1
    seen: int = 0
    worse: int = 0

    def after(self, loss: float) -> "LossHistory":
        """A loss that equals the lowest takes its place."""
        if loss <= self.lowest:
            return LossHistory(loss, self.seen, self.seen + 1, 0)
        return replace(self, seen=self.seen + 1, worse=self.worse + 1)


@dataclass(frozen=True)
class EarlyStopping:
    """Local training, epoch by epoch, until it settles.

    Attributes:
        patience: Epochs that may be worse in a row, or slightly better in all, before training stops.
        tolerance: A fall of the loss below this, or none, is slight.
        cap: Most epochs.
        slight: Slight falls so far; a larger fall in between does not reset them.
        course: The validation loss so far.

    Raises:
        ValueError: If patience or cap is below 1, or tolerance below 0.
    """

    patience: int
    tolerance: float = 0.01
    cap: int = 200
    slight: int = 0
    course: LossHistory = field(default_factory=LossHistory)

    def __post_init__(self) -> None:
        if self.patience < 1 or self.cap < 1:
            raise ValueError(f"patience and cap must be at least 1, got {self.patience} and {self.cap}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be below 0, got {self.tolerance}")

    def after(self, validation_loss: float) -> "EarlyStopping":
        """Take the validation loss of one more epoch."""
        assert not self.stopped
        lowest = self.course.lowest
        slight = validation_loss <= lowest and lowest - validation_loss < self.tolerance
        return replace(self, slight=self.slight + slight, course=self.course.after(validation_loss))

    @property
    def stopped(self) -> Literal["", "slight", "early_stop", "cap"]:
        """Why training is over; empty while it is not."""
        if self.slight >= self.patience:
            return "slight"
        if self.course.worse >= self.patience:
            return "early_stop"
        return "cap" if self.epochs >= self.cap else ""

    @property
    def epochs(self) -> int:
        """Epochs so far."""
        return self.course.seen

    @property
    def best_epoch(self) -> int:
        """Epoch, from 0, whose weights are returned; -1 before any loss was a number."""
        return self.course.best
