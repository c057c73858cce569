"""What a person sees of a running experiment; nothing where nobody looks at a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.system.formatting import counted
from strategies.base.round_record import RoundRecord, Waiting
from strategies.base.state import FederationState
from strategies.rounds.guard.broken_model import RolledBack, condemned_sentence, sentence_of


class ProgressBar:
    """Round, sites, losses and time left on one line. A :class:`server.federation.run.Watcher`."""

    def __init__(self, console: Console, title: str) -> None:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task(title, total=None, facts="waiting for sites")
        self._sites = 0

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def waiting(self, waiting: Waiting) -> None:
        """A simulation's sites are all there."""

    def joined(self, server_round: int, site: str) -> None:
        """Do nothing: no site joins a simulation late."""

    def left_out(self, site: str, reason: str) -> None:
        """What a simulated site may do, its experiment decides; the run's events have it."""

    def rolled_back(self, rolled_back: RolledBack) -> None:
        self._progress.console.print(sentence_of(rolled_back), markup=False)

    def condemned(self, server_round: int, site: str, reason: str) -> None:
        self._progress.console.print(condemned_sentence(server_round, site, reason), markup=False)

    def began(self, sites: Sequence[str], rounds: int) -> None:
        self._sites = len(sites)
        self._progress.update(self._task, total=rounds, facts=f"{counted(len(sites), 'site')}, first round")

    def round_done(self, record: RoundRecord, state: FederationState) -> None:
        facts = f"{len(record.sites)} of {self._sites} sites"
        if (trained := record.mean_train_loss) is not None:
            facts += f"  loss {trained:.3f}"
        if (loss := record.validation.mean_loss) is not None:
            facts += f"  round before: validation {loss:.3f}"
        if (auroc := record.validation.mean_auroc) is not None:
            facts += f"  AUROC {auroc:.3f}"
        self._progress.update(self._task, completed=record.round, facts=facts)
