"""Training of a model at one site without the others, by the method ``individual``.

The result has the same bits as the model that a run of the method ``individual`` gives this site from the same seed and
initial model. The best round is chosen on the site's own validation part. Training adds no noise and spends no privacy
budget, even if the run has privacy, because the model does not leave. Each finished round is stored on disk, so that an
interrupted training continues after it.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.memory import remove_old_run_states
from polyclinic.client.site.site import Site
from polyclinic.client.training.figures import score_data_part
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.client.training.local_round import load_best_local_parts
from polyclinic.client.training.task import prepare_local_task
from polyclinic.common.config import EvaluationSection, HospitalPlan, PrivacySection
from polyclinic.common.models.saved import save_model
from polyclinic.common.wire.records import ModelGroups, TrainRequest
from polyclinic.strategies.local.site_method import SiteMethod

LOCAL_ONLY_METHOD = "individual"
WARM_UP_PARAMETERS = ("warm_up_epochs", "warm_up_lr")


def make_local_only_plan(plan: HospitalPlan, method: SiteMethod, rounds: int, *, warm_up: bool) -> HospitalPlan:
    """Return a copy of a run's plan for training at one site only (method ``individual``), without privacy.

    Args:
        method: The run's method; the copy has its parameter ``trunk``.
        rounds: Number of rounds in the copy.
        warm_up: True to keep the method's warm-up epochs too.
    """
    parameters = {"trunk": method.parameters.trunk}
    parameters |= {name: getattr(method.parameters, name) for name in WARM_UP_PARAMETERS if warm_up}
    return plan.model_copy(
        update={
            "run": plan.run.model_copy(update={"method": LOCAL_ONLY_METHOD, "rounds": rounds, "keep_updates": False}),
            "method": parameters,
            "evaluation": EvaluationSection(criterion=plan.evaluation.criterion),
            "privacy": PrivacySection(),
        }
    )


@dataclass(frozen=True)
class LocalOnlyTraining:
    """Training of a model at one site without the other sites.

    Attributes:
        site: The site as :meth:`Site.copy_site_for_local_training` returns it.
        plan: The plan as :func:`make_local_only_plan` returns it.
        initial: The initial model, with head rows of the site's own classes.
    """

    site: Site
    plan: HospitalPlan
    initial: ModelGroups

    def train_and_score_local_model(
        self, model_folder: Path, contract: str
    ) -> tuple[NDArray[np.floating], tuple[str, ...]]:
        """Train the rounds that are not on disk yet, save the best round's model, and score the test part with it.

        Args:
            model_folder: Folder for the saved model.
            contract: SHA-256 of the run's label contract (its agreed class names), which is saved with the model.

        Returns:
            The probabilities ``(n, classes)``, and the class names.
        """
        memory = self.site.folder / "memory"
        remove_old_run_states(memory, self._local_run_name)
        folder = self.site.open_run_state_folder(self._local_run_name)
        last = self.plan.run.rounds
        for server_round in range(folder.newest_stored_round + 1, last + 1):
            train_with_privacy_layers(self.site, self._make_train_request(server_round, server_round - 1))
        request = self._make_train_request(last, last)
        task = prepare_local_task(self.site, request)
        with task.use_seed_of(self.site.name, "home"):
            load_best_local_parts(task, request, task.validate_current_network())
            form = self.site.pixel_form
            words = self.plan.vocabulary
            save_model(
                model_folder,
                task.whole,
                label_contract_sha256=contract,
                pixels=form,
                vocabulary=words,
                private=True,
            )
            scores, _, names = score_data_part(task, "test")
        return scores, names

    def _make_train_request(self, server_round: int, counted: int) -> TrainRequest:
        """Make the request to train that a coordinator would send for a round of the method ``individual``.

        Args:
            counted: Number of the round with whose stored state training continues; 0 to start without one.
        """
        return TrainRequest(
            run=self._local_run_name,
            round=server_round,
            plan=self.plan.model_dump_json(),
            contract="",
            class_names=self.site.declaration.canonical_names,
            counted=counted,
            best=-1,
            left_out="",
            model=self.initial,
        )

    @cached_property
    def _local_run_name(self) -> str:
        """Return the name under which this training is stored, so that only a training with equal inputs is continued.

        The name is a hash of the plan, of the mask of known labels, and of the initial model.
        """
        digest = hashlib.sha256(self.plan.model_dump_json().encode())
        # The copy has labels of hidden classes only if no metric of its models leaves.
        digest.update(np.isnan(self.site.train.labels).tobytes())
        for name, array in sorted(self.initial.to_named_arrays().items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:32]
