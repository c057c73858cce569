"""A site's privacy budget: the ledger of its noisy replies' costs on disk, and the noise of a round.

All runs share one ledger, because they use the same patients. The site writes first the reply, then its cost to disk,
and sends the reply last. If the process is killed in between, the same request gets the stored reply at no further
cost. Any other request is answered with new noise, at a new cost.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from client.gate.incoming_request import RequestTimeExceeded
from client.site.site import Site
from client.training.task import LocalTask, LocalTrainingResult, SiteRoundLayer, Train
from common.config import HospitalPlan
from common.errors import BadInput, Fault, WireError, quote_names
from common.models.state import ModelState, make_model_layout, read_model_state, split_state_into_tensors
from common.system.files import write_atomically
from common.system.hashing import derive_seed
from common.wire.records import Arrays, ModelGroups, Request, TrainReply, TrainRequest, select_arrays_with_prefix
from strategies.local.site_method import SiteMethod
from strategies.privacy.image_gradients import CONSTANT_BUFFERS
from strategies.privacy.mechanism import (
    Accountant,
    NoisySteps,
    SitePrivacySettings,
    compute_epsilon,
    make_site_privacy_settings,
)
from strategies.privacy.noise import NoiseSource, make_secret_noise_source, make_seeded_noise_source

FOLDER = "privacy"


@dataclass(frozen=True)
class PrivacyCostEntry:
    """The privacy cost of one reply, which may have left the site.

    Attributes:
        request: Hash of the request, by :func:`hash_train_request`.
        count: Number of noisy steps.
    """

    run: str
    round: int
    request: str
    noise_multiplier: float
    sample_rate: float
    count: int

    @property
    def noisy_steps(self) -> NoisySteps:
        """Return the reply's noisy steps, from which an accountant computes epsilon."""
        return NoisySteps(self.noise_multiplier, self.sample_rate, self.count)


def hash_train_request(request: TrainRequest) -> str:
    """Return the SHA-256 of a request's content, to recognise a repeated request."""
    digest = hashlib.sha256()
    plain = (request.run, request.round, request.plan, request.contract, request.counted, request.best)
    digest.update(json.dumps([*plain, list(request.class_names)]).encode())
    for name, array in sorted(
        {**request.model.to_named_arrays(), **_prefix_array_names("told", request.statistics)}.items()
    ):
        digest.update(f"\0{name}\0{list(array.shape)}\0".encode())
        digest.update(array.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


class LastStoredReply(NamedTuple):
    """The last reply, stored before its privacy cost; ``left`` is the hash of the site's state after training."""

    reply: TrainReply
    left: bytes


class PrivacyBudgetLedger:
    """The file of privacy costs in a site's folder, with the last reply beside it."""

    def __init__(self, site: Path, *, durable: bool = True) -> None:
        self._folder, self._durable = site / FOLDER, durable

    @property
    def entries(self) -> tuple[PrivacyCostEntry, ...]:
        """Return the costs of all replies in the order in which they were written."""
        if not self._ledger_path.exists():
            return ()
        return tuple(
            PrivacyCostEntry(**entry) for entry in json.loads(self._ledger_path.read_text(encoding="utf-8"))["entries"]
        )

    def compute_total_epsilon(
        self, delta: float, more: Sequence[NoisySteps] = (), run: str = "", accountant: Accountant = "prv"
    ) -> float:
        """Return the epsilon of one run, or of all runs if ``run`` is empty.

        Args:
            more: Noisy steps to count in addition to those in the ledger.
        """
        counts = Counter[tuple[float, float]]()  # equal steps as one entry, which is faster to account for
        for step in (*(entry.noisy_steps for entry in self.entries if run in ("", entry.run)), *more):
            counts[step.noise_multiplier, step.sample_rate] += step.count
        steps = [NoisySteps(noise, rate, count) for (noise, rate), count in counts.items()]
        return compute_epsilon(steps, delta, accountant)

    def find_stored_reply(self, request: str) -> LastStoredReply | None:
        """Return the stored reply if it answers the request with this hash; otherwise None."""
        if not self._reply_path.exists():
            return None
        with safe_open(self._reply_path, framework="numpy") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            if facts.pop("request") != request:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        classes, form, left = facts.pop("classes"), facts.pop("form"), bytes.fromhex(facts.pop("left"))
        update = replace(ModelGroups.from_named_arrays(select_arrays_with_prefix("update", arrays), classes), form=form)
        return LastStoredReply(
            TrainReply(**facts, update=update, statistics=select_arrays_with_prefix("statistics", arrays)), left
        )

    def write_reply_and_cost(self, entry: PrivacyCostEntry, paid: LastStoredReply) -> None:
        """Write a reply and then its privacy cost to disk, before the reply is sent."""
        reply, head = paid.reply, paid.reply.update.head
        facts = {name: value for name, value in vars(reply).items() if name not in ("update", "statistics")}
        facts |= {"request": entry.request, "left": paid.left.hex(), "form": reply.update.form}
        facts["classes"] = list(head.class_names) if head else []
        arrays = {
            **_prefix_array_names("update", reply.update.to_named_arrays()),
            **_prefix_array_names("statistics", reply.statistics),
        }
        content = save({name: array.copy() for name, array in arrays.items()}, {"facts": json.dumps(facts)})
        write_atomically(self._reply_path, content, durable=self._durable, private=True)
        self.write_privacy_cost(entry)

    def write_privacy_cost(self, entry: PrivacyCostEntry, *, once: bool = False) -> None:
        """Write the privacy cost of a reply, or of an error sent instead (which can depend on images), to the ledger.

        Args:
            once: Write nothing if the last entry is the cost of the same request.
        """
        entries = self.entries
        if once and entries and entries[-1].request == entry.request:
            return
        text = json.dumps({"entries": [asdict(noted) for noted in (*entries, entry)]}, indent=1)
        write_atomically(self._ledger_path, text.encode(), durable=self._durable, private=True)

    @property
    def _ledger_path(self) -> Path:
        return self._folder / "ledger.json"

    @property
    def _reply_path(self) -> Path:
        return self._folder / "last-reply.safetensors"


def _prefix_array_names(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def open_privacy_ledger(site: Site) -> PrivacyBudgetLedger:
    """Return the privacy ledger of a site."""
    return PrivacyBudgetLedger(site.folder, durable=site.durable)


def make_privacy_status(site: Site) -> dict[str, float | None]:
    """Return epsilon of all runs, delta and budget, for the site's status; empty without budget and without costs."""
    ledger, policy = open_privacy_ledger(site), site.policy
    if not ledger.entries and policy.epsilon is None:
        return {}
    spent = ledger.compute_total_epsilon(policy.delta)
    return {"epsilon": _finite_or_none(spent), "delta": policy.delta, "budget": policy.epsilon}


def refuse_over_privacy_budget(site: Site, plan: HospitalPlan, method: SiteMethod) -> None:
    """Refuse a plan if another round of it would exceed the site's privacy budget.

    Raises:
        BadInput: If the budget would be exceeded.
    """
    protection, budget = make_site_privacy_settings(plan, method, site.train_samples), site.policy.epsilon
    if protection is None or budget is None:
        return
    after = open_privacy_ledger(site).compute_total_epsilon(site.policy.delta, [protection.noisy_steps_per_round])
    if after > budget:
        spent = f"another round would bring what all runs have cost to epsilon {after:.2f}"
        problem = f"{spent}; this site allows {budget:g}."
        raise BadInput([Fault("site.toml: policy.epsilon", problem, "It takes no further part.")])


class UnnoisedChange(BadInput):
    """Raised if a value of the model changed without noise.

    Such a change depends on the images, so this refusal counts in the privacy budget like a reply.
    """


def refuse_unnoised_change(task: LocalTask, state: ModelState, covered: Iterable[Tensor] = ()) -> None:
    """Refuse to send the update if a value without noise differs from the received model.

    Args:
        state: The model's values now.
        covered: The parameters that training with noise has changed; their differences are accepted.

    Raises:
        UnnoisedChange: If any other value differs, for instance a buffer that holds a mean of images.
    """
    layout, of_optimizer = make_model_layout(task.network), set(map(id, covered))
    before, after = (split_state_into_tensors(values, layout) for values in (task.received, state))
    tensors = task.network.state_dict(keep_vars=True)
    changed = [
        name.removeprefix("backbone.")
        for name, values in after.items()
        if id(tensors[name]) not in of_optimizer and not np.array_equal(values, before[name], equal_nan=True)
    ]
    if changed:
        problem = f"changes {quote_names(changed, limit=4)} beside its training: what it keeps of images has no noise."
        raise UnnoisedChange([Fault("model.architecture", problem, CONSTANT_BUFFERS)])


@dataclass(frozen=True)
class PrivacyBudgetLayer(SiteRoundLayer):
    """Adds a plan's noise to a round, and charges its cost to the site's privacy budget."""

    site: Site
    plan: HospitalPlan
    method: SiteMethod

    @cached_property
    def site_privacy(self) -> SitePrivacySettings:
        """Return the noise and the cost of each round of the run at this site."""
        protection = make_site_privacy_settings(self.plan, self.method, self.site.train_samples)
        assert protection is not None, "this layer is on for plans with privacy only"
        return protection

    def wrap_answer(self, answer: Callable[[TrainRequest], TrainReply], request: TrainRequest) -> TrainReply:
        """Answer a request to train if the privacy budget allows it, and charge the cost.

        If the last request is repeated, return the stored reply.

        Raises:
            BadInput: If the round would exceed the budget, or the number of replies that the plan's noise allows.
        """
        site, plan, cost = self.site, self.plan, self.site_privacy.noisy_steps_per_round
        ledger, digest, section = open_privacy_ledger(site), hash_train_request(request), plan.privacy
        entry = PrivacyCostEntry(
            request.run, request.round, digest, cost.noise_multiplier, cost.sample_rate, cost.count
        )
        if (paid := ledger.find_stored_reply(digest)) is not None:
            ledger.write_privacy_cost(entry, once=True)
        else:
            answers = sum(entry.run == request.run for entry in ledger.entries)
            most = plan.run.rounds + self.method.ranks_sites  # answers that the plan's noise was computed for
            if section.epsilon is not None and answers >= most:
                problem = f"this run's plan has noise for {most} answers, and this site has given them."
                raise BadInput([Fault("run.rounds", problem, "It takes no further part.")])
            refuse_over_privacy_budget(site, plan, self.method)
            spent = ledger.compute_total_epsilon(section.delta, [cost], request.run, section.accountant)
            try:
                reply = answer(request)
            except (BadInput, WireError) as error:
                if isinstance(error, UnnoisedChange):
                    ledger.write_privacy_cost(entry)
                raise  # the others are faults of the request itself
            except (Exception, RequestTimeExceeded):
                ledger.write_privacy_cost(entry)  # an error can depend on the images as well
                raise
            reply = replace(reply, epsilon=_finite_or_none(spent))
            if not site.policy.metrics_outside_privacy:
                # The number of epochs until a loss settles, and the time, depend on the images.
                reply = replace(reply, epochs=plan.training.epochs, seconds=0.0)
            paid = LastStoredReply(reply, site.open_run_state_folder(request.run).read_round_state_hash(request.round))
            ledger.write_reply_and_cost(entry, paid)
        if not section.secure_aggregation:
            # Later rounds may start from this state, whose cost is charged. A masked round must also be unmasked.
            site.open_run_state_folder(request.run).mark_round_settled(request.round, paid.left)
        return paid.reply

    def adapt_task(self, task: LocalTask, request: Request) -> LocalTask:
        """Return a task that adds noise to each training step, if the plan has noise in the steps."""
        if self.plan.privacy.level == "update" or not isinstance(request, TrainRequest):
            return task
        site = self.site
        rows = site.find_rows_to_train_on(site.get_images_to_train_on("train", self.plan))
        patients = site.train.patients if rows is None else site.train.patients[rows]
        return replace(
            task, epoch=self.site_privacy.make_private_trainer(self.method, self._make_noise_source(request), patients)
        )

    def wrap_training(self, train: Train, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train, then add noise to update and statistics if the plan has noise on updates.

        If the plan has noise in each training step instead, check that nothing else changed the model.

        Raises:
            UnnoisedChange: If evaluation or training changed a value of the model without noise.
        """
        if self.plan.privacy.level != "update":
            refuse_unnoised_change(task, read_model_state(task.network))  # evaluation, before training
            result = train(task, request)
            groups = result.optimizer.param_groups
            refuse_unnoised_change(task, result.state, [value for group in groups for value in group["params"]])
            return result
        result = train(task, request)
        noisy = self.site_privacy.make_reply_noise(self._make_noise_source(request))
        update, statistics = noisy(result.update, result.statistics)
        return replace(result, update=update, statistics=statistics)

    def _make_noise_source(self, request: Request) -> NoiseSource:
        site = self.site
        seed = derive_seed(self.plan.run.seed, request.round, site.name, "noise")
        return make_seeded_noise_source(seed) if site.simulated else make_secret_noise_source()


def _finite_or_none(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
