"""Who is told a run's figures: TensorBoard's files always, MLflow where asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.config import Experiment
from server.runs.folder import RunFolder
from server.runs.scalars import Ending, Track
from server.runs.tracking.mlflow import MLflowStore, mlflow_store
from server.runs.tracking.tensorboard import FOLDER, TensorBoard


def store_for(track: Track | None) -> MLflowStore | None:
    """Open what the run will be told to; before anything else, so that a run never finds it missing at its end.

    Raises:
        BadInput: If it is not installed or cannot be used.
    """
    return None if track is None else mlflow_store()


@contextmanager
def tracked(
    folder: RunFolder, experiment: Experiment, store: MLflowStore | None, tell: Callable[[str], None]
) -> Iterator[None]:
    """Pass on what is written to the folder, until the run ends, however it does.

    Args:
        tell: Told if the store takes no more; the run goes on without it.
    """

    def lost(reason: str) -> None:
        folder.event("tracking_stopped", reason=reason)
        tell(f"MLflow takes no more figures of this run, which goes on: {reason}")

    folder.trackers.append(TensorBoard(folder.path / FOLDER))
    if store is not None:
        folder.trackers.append(store.new_run(experiment, lost))
    ending: Ending = "interrupted"
    try:
        yield
        ending = "finished"
    except Exception:
        ending = "stopped"
        raise
    finally:
        while folder.trackers:
            folder.trackers.pop().close(ending)
