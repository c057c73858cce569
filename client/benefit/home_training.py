"""A model that a site trains for itself, from a model that is given, by the method ``individual`` as it stands.

So a model trained alone here is, bit for bit, what a run of ``individual`` gives this site from the same seed, and the
round that it ends with is chosen on the site's own validation part. No noise is added and no budget is spent, also in a
run with privacy: nothing of it leaves. Each round is on the disk when it ends; after a kill the next one goes on.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.site.memory import MemoryFolder, forget_other_runs
from client.site.site import Site
from client.training.figures import scored
from client.training.layers import train_round
from client.training.local_round import load_best_parts
from client.training.task import prepare_task
from common.config import EvaluationSection, Plan, PrivacySection
from common.models.saved import save_model
from common.system.hashing import seed_of
from common.wire.records import Groups, TrainRequest
from strategies.local.site_method import SiteMethod
from strategies.local.training import reproducible

METHOD = "individual"
WARM_UP = ("warm_up_epochs", "warm_up_lr")


def plan_at_home(plan: Plan, method: SiteMethod, rounds: int, *, warm_up: bool) -> Plan:
    """Change the run's plan to training alone: everything that is not about other sites stays.

    Args:
        method: Of the run.
        rounds: To train.
        warm_up: Whether to begin as the run began, with the backbone frozen, if it did.
    """
    kept = {"trunk": method.parameters.trunk}
    kept |= {name: getattr(method.parameters, name) for name in WARM_UP if warm_up}
    return plan.model_copy(
        update={
            "run": plan.run.model_copy(update={"method": METHOD, "rounds": rounds, "keep_updates": False}),
            "method": kept,
            "evaluation": EvaluationSection(criterion=plan.evaluation.criterion),
            "privacy": PrivacySection(),
        }
    )


@dataclass(frozen=True)
class HomeTraining:
    """One training of a site for itself.

    Attributes:
        site: As it is for itself (:meth:`Site.for_itself`).
        plan: Of :func:`plan_at_home`.
        beginning: The model to start from, with head rows of the site's own classes.
    """

    site: Site
    plan: Plan
    beginning: Groups

    def scores(self, model_folder: Path, contract: str) -> tuple[NDArray[np.floating], tuple[str, ...]]:
        """Train what is left to train, save the model, and score the test part with it, ``(n, classes)``."""
        folder = self._trained()
        request = self._asked(folder, self.plan.run.rounds, self.plan.run.rounds)
        task = prepare_task(self.site, request)
        with reproducible(seed_of(self.plan.run.seed, self.site.name, "home"), self.plan.training.threads):
            load_best_parts(task, request, task.validated())
            save_model(model_folder, task.whole, label_contract_sha256=contract)
            scores, _, names = scored(task, "test")
        return scores, names

    def _trained(self) -> MemoryFolder:
        memory = self.site.folder / "memory"
        forget_other_runs(memory, self._name)
        folder = MemoryFolder(memory / self._name, durable=self.site.durable)
        for server_round in range(folder.newest + 1, self.plan.run.rounds + 1):
            train_round(self.site, self._asked(folder, server_round, server_round - 1))
        return folder

    def _asked(self, folder: MemoryFolder, server_round: int, counted: int) -> TrainRequest:
        """Return the request of a round, as a coordinator of `individual` makes it."""
        return TrainRequest(
            run=folder.folder.name,
            round=server_round,
            plan=self.plan.model_dump_json(),
            contract="",
            class_names=self.site.declaration.canonical,
            counted=counted,
            best=-1,
            left_out="",
            model=self.beginning,
        )

    @property
    def _name(self) -> str:
        """Name exactly this training, so that one that was interrupted goes on, and no other."""
        digest = hashlib.sha256(self.plan.model_dump_json().encode())
        # Which labels it learns: with hidden ones where no figure leaves, without where some do.
        digest.update(np.isnan(self.site.train.labels).tobytes())
        for name, array in sorted(self.beginning.named().items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:32]
