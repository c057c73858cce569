"""A run that takes back a model that collapsed: state, checkpoint and books of the round to go back to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from common.models.state import ModelState
from server.federation.accounting import Books, as_json
from server.federation.checkpoints import Checkpoint, CheckpointFolder
from server.federation.evaluation import Setting
from strategies.engine.round_record import FederationValidation
from strategies.engine.state import FederationState


@dataclass
class Backwards:
    """Puts a run back to the end of an earlier round.

    Attributes:
        initial: The model before round 1, which has no checkpoint.
    """

    setting: Setting
    books: Books
    checkpoints: CheckpointFolder
    initial: ModelState
    _at_start: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._at_start = Books(self.setting.folder, self.books.workers).facts()

    def state_after(self, server_round: int) -> FederationState | None:
        """The state after a round; None where its checkpoint is not there any more."""
        if server_round == 0:
            return FederationState(0, self.initial)
        checkpoint = self.checkpoints.after(server_round)
        return None if checkpoint is None else checkpoint.state

    def go_back(self, state: FederationState, experiment: Mapping[str, Any]) -> FederationValidation:
        """Take back what was noted since the end of that round; write the state down as its checkpoint.

        Returns:
            What was said of the model that the run goes on from.
        """
        earlier = self.checkpoints.after(state.round) if state.round else None
        judged = {} if earlier is None else earlier.last_validation
        books = self._at_start if earlier is None else earlier.books
        self.books.go_on_from(books, state.round)
        found = TypeAdapter(FederationValidation).validate_python(judged) if judged else FederationValidation()
        self.checkpoints.go_back(Checkpoint(self.setting.run, state, experiment, books, as_json(found)))
        return found
