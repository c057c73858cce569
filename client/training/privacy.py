"""A site's privacy budget: the costs of its noisy replies on disk, and the noise of a round.

The budget belongs to the patients, so a hospital counts it in a ledger outside its folder, which all folders with the
same patients share (:mod:`polyclinic.client.site.patient_ledger`). The folder also stores the costs of its own replies.
A ledger that was lost, or restored from an older copy, receives them again.

The cost of a round is reserved in the patients' ledger before the training. After the training the site writes the
reply to disk, then the cost, and then sends the reply. If the process is killed in between, the same request gets the
stored reply at no further cost. Any other request is answered with new noise, at a new cost.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from polyclinic.client.gate.incoming_request import RequestTimeExceeded
from polyclinic.client.site.budget import describe_costs_by_federation
from polyclinic.client.site.patient_ledger import (
    ChargedCost,
    LedgerUnusable,
    PatientCosts,
    PatientLedger,
    PrivacyCostEntry,
    make_cost_id,
)
from polyclinic.client.site.site import Site
from polyclinic.client.training.task import LocalTask, LocalTrainingResult, SiteRoundLayer, TrainStep
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, Fault, WireError, quote_names
from polyclinic.common.models.state import ModelState, make_model_layout, read_model_state, split_state_into_tensors
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.common.wire.records import (
    Arrays,
    ModelGroups,
    Request,
    TrainReply,
    TrainRequest,
    select_arrays_with_prefix,
)
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.privacy.image_gradients import CONSTANT_BUFFERS
from polyclinic.strategies.privacy.mechanism import (
    Accountant,
    NoisySteps,
    SitePrivacySettings,
    compute_epsilon,
    make_site_privacy_settings,
)
from polyclinic.strategies.privacy.noise import NoiseSource, make_secret_noise_source, make_seeded_noise_source

PRIVACY_FOLDER = "privacy"


def hash_train_request(request: TrainRequest) -> str:
    """Return the SHA-256 of a request's content, to detect a repeated request."""
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
    """The last reply, which is stored before its privacy cost.

    Attributes:
        state_hash: Hash of the site's state after training.
        cost: The reply's cost; None if an earlier release stored the reply.
    """

    reply: TrainReply
    state_hash: bytes
    cost: PrivacyCostEntry | None = None


class PrivacyBudgetLedger:
    """The file with the privacy costs of a folder's own replies, and the file with the last reply."""

    def __init__(self, site: Path, *, durable: bool = True) -> None:
        self._folder = site / PRIVACY_FOLDER
        self._durable = durable

    @property
    def entries(self) -> tuple[PrivacyCostEntry, ...]:
        """Return the costs of all replies, in the order of writing.

        Raises:
            LedgerUnusable: If the file is damaged.
        """
        try:
            tree = json.loads(self._ledger_path.read_text(encoding="utf-8"))
            entries = [_read_cost_entry(facts) for facts in tree["entries"]]
        except FileNotFoundError:
            return ()
        except (ValueError, LookupError, TypeError) as error:
            problem = f"{self._ledger_path} is damaged ({error})."
            remedy = (
                "Put its backup back. If there is none, remove it: the privacy ledger of the patients has its costs."
            )
            raise LedgerUnusable(f"{problem} {remedy}") from None
        return tuple(
            entry if entry.id else replace(entry, id=_derive_cost_id(entry, index))
            for index, entry in enumerate(entries)
        )

    def compute_total_epsilon(
        self, delta: float, more: Sequence[NoisySteps] = (), run: str = "", accountant: Accountant = "prv"
    ) -> float:
        """Return the epsilon of one run, or of all runs if ``run`` is empty.

        Args:
            more: Noisy steps to count in addition to the ledger's steps.
        """
        own = (entry.noisy_steps for entry in self.entries if run in ("", entry.run))
        return compute_epsilon(merge_equal_steps([*own, *more]), delta, accountant)

    def find_stored_reply(self, request: str) -> LastStoredReply | None:
        """Return the stored reply if it answers the request with this hash, else None."""
        if not self._reply_path.exists():
            return None
        with safe_open(self._reply_path, framework="numpy") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            if facts.pop("request") != request:
                return None
            cost = facts.pop("cost", None)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        classes = facts.pop("classes")
        form = facts.pop("form")
        state_hash = bytes.fromhex(facts.pop("left"))
        update = replace(ModelGroups.from_named_arrays(select_arrays_with_prefix("update", arrays), classes), form=form)
        statistics = select_arrays_with_prefix("statistics", arrays)
        reply = TrainReply(**facts, update=update, statistics=statistics)
        return LastStoredReply(reply, state_hash, PrivacyCostEntry(**cost) if cost else None)

    def write_reply_and_cost(self, entry: PrivacyCostEntry, paid: LastStoredReply) -> None:
        """Write a reply and then its privacy cost to disk, before the reply is sent."""
        reply = paid.reply
        head = paid.reply.update.head
        facts = {name: value for name, value in vars(reply).items() if name not in ("update", "statistics")}
        facts |= {
            "request": entry.request,
            "cost": asdict(entry),
            "left": paid.state_hash.hex(),
            "form": reply.update.form,
        }
        facts["classes"] = list(head.class_names) if head else []
        arrays = {
            **_prefix_array_names("update", reply.update.to_named_arrays()),
            **_prefix_array_names("statistics", reply.statistics),
        }
        content = save({name: array.copy() for name, array in arrays.items()}, {"facts": json.dumps(facts)})
        write_atomically(self._reply_path, content, durable=self._durable, private=True)
        self.write_privacy_cost(entry)

    def write_privacy_cost(self, entry: PrivacyCostEntry, *, once: bool = False) -> None:
        """Write the privacy cost of a reply to the ledger, or of an error sent instead, which can depend on images.

        Args:
            once: Write nothing if the last entry is the cost of the same request.
        """
        entries = self.entries
        if once and entries and entries[-1].request == entry.request:
            return
        text = json.dumps({"entries": [asdict(cost) for cost in (*entries, entry)]}, indent=1)
        write_atomically(self._ledger_path, text.encode(), durable=self._durable, private=True)

    @property
    def _ledger_path(self) -> Path:
        return self._folder / "ledger.json"

    @property
    def _reply_path(self) -> Path:
        return self._folder / "last-reply.safetensors"


def _prefix_array_names(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def _read_cost_entry(facts: Any) -> PrivacyCostEntry:
    """Return an entry of the ledger file from its JSON fields.

    Raises:
        TypeError: If a field is missing, unknown or of the wrong type.
    """
    entry = PrivacyCostEntry(**facts)
    texts = (entry.run, entry.request, entry.id, entry.patients)
    numbers = (entry.noise_multiplier, entry.sample_rate)
    whole_numbers = (entry.round, entry.count)
    is_valid = (
        all(isinstance(value, str) for value in texts)
        and all(isinstance(value, int | float) for value in numbers)
        and all(isinstance(value, int) for value in whole_numbers)
    )
    if not is_valid:
        raise TypeError("an entry has a text for a number, or a number for a text")
    return entry


def _derive_cost_id(entry: PrivacyCostEntry, index: int) -> str:
    """Return an id for a cost that an earlier release wrote without one; it is the same in each copy of the folder."""
    facts = {name: value for name, value in asdict(entry).items() if name != "patients"}
    return hashlib.sha256(json.dumps([index, facts]).encode()).hexdigest()[:32]


def open_privacy_ledger(site: Site) -> PrivacyBudgetLedger:
    """Return the ledger with the costs of a site's own replies."""
    return PrivacyBudgetLedger(site.folder, durable=site.durable)


# ---------------------------------------------------------------------- the patients' budget


def open_patient_ledger(site: Site) -> PatientLedger | None:
    """Return the ledger of a site's patients, after adding missing costs of this folder; None for a simulated site.

    Raises:
        LedgerUnusable: If it cannot be opened, read or written.
    """
    if site.ledger is None:
        return None
    # The validation part counts too, because with noise on updates it may decide which epoch is sent.
    site.ledger.identify_patients(site.train, site.validation)
    site.ledger.spend_costs(open_privacy_ledger(site).entries)
    return site.ledger


def merge_equal_steps(steps: Iterable[NoisySteps]) -> list[NoisySteps]:
    """Merge equal noisy steps into one entry with a larger count, which an accountant evaluates faster."""
    counts = Counter[tuple[float, float]]()
    for step in steps:
        counts[step.noise_multiplier, step.sample_rate] += step.count
    return [NoisySteps(noise, rate, count) for (noise, rate), count in counts.items()]


def compute_largest_patient_epsilon(costs: PatientCosts, delta: float, more: Sequence[NoisySteps] = ()) -> float:
    """Return the largest epsilon of any present patient.

    Args:
        more: Noisy steps to count in addition, for each patient.
    """
    histories = _list_patient_histories(costs, more)
    largest = 0.0
    # The RDP accountant gives a quick upper bound. A history below the largest epsilon so far needs no exact value.
    bounds = [compute_epsilon(steps, delta, "rdp") for steps in histories]
    for bound, steps in sorted(zip(bounds, histories, strict=True), key=lambda pair: -pair[0]):
        if bound > largest:
            largest = max(largest, compute_epsilon(steps, delta, "prv"))
    return largest


def _is_largest_patient_epsilon_within(
    budget: float, costs: PatientCosts, delta: float, more: Sequence[NoisySteps]
) -> bool:
    """Return True if the largest epsilon of a present patient is at most ``budget``, by the quick bound if possible."""
    quick_bounds = (compute_epsilon(steps, delta, "rdp") for steps in _list_patient_histories(costs, more))
    return max(quick_bounds) <= budget or compute_largest_patient_epsilon(costs, delta, more) <= budget


def _list_patient_histories(costs: PatientCosts, more: Sequence[NoisySteps]) -> list[list[NoisySteps]]:
    """Return the noisy steps of single patients (:meth:`PatientCosts.list_costs_of_patients`), each with ``more``."""
    return [
        merge_equal_steps([*(charged.cost.noisy_steps for charged in charges), *more])
        for charges in costs.list_costs_of_patients()
    ]


def make_privacy_status(site: Site) -> dict[str, Any]:
    """Return epsilon of all runs, delta and budget, for the site's status; empty without budget and without costs.

    For a hospital, epsilon is the largest of any present patient. There are also: ``left``, the rest of the budget;
    ``patients``, their number; ``federations``, with runs, present patients and their largest epsilon for each;
    ``ledger``, the ledger's file; and ``shared``, True if other folders use the same file.

    Raises:
        LedgerUnusable: If the patients' ledger cannot be opened, read or written.
    """
    site_ledger = open_privacy_ledger(site)
    policy = site.policy
    if not site_ledger.entries and policy.epsilon is None:
        return {}
    ledger = open_patient_ledger(site)
    if ledger is None:
        spent = site_ledger.compute_total_epsilon(policy.delta)
        return {"epsilon": _finite_or_none(spent), "delta": policy.delta, "budget": policy.epsilon}
    costs = ledger.list_costs()
    spent = compute_largest_patient_epsilon(costs, policy.delta)
    return {
        "epsilon": _finite_or_none(spent),
        "delta": policy.delta,
        "budget": policy.epsilon,
        "left": None if policy.epsilon is None else max(0.0, policy.epsilon - spent),
        "patients": costs.patients,
        "federations": _list_costs_by_federation(costs, policy.delta),
        "ledger": str(ledger.path),
        "shared": ledger.shared,
    }


def make_privacy_status_at_start(site: Site) -> dict[str, Any]:
    """Return the result of :func:`make_privacy_status` when a hospital's program starts.

    Raises:
        BadInput: If the patients' ledger cannot be used, because costs would not be counted.
    """
    try:
        return make_privacy_status(site)
    except LedgerUnusable as error:
        raise BadInput([Fault("privacy ledger", str(error))]) from None


def _list_costs_by_federation(costs: PatientCosts, delta: float) -> list[dict[str, Any]]:
    parts = defaultdict[tuple[str, str], list[ChargedCost]](list)
    for charged in costs.charged:
        parts[charged.federation, charged.site].append(charged)
    rows = []
    for (federation, site), charges in parts.items():
        part = replace(costs, charged=charges)
        rows.append(
            {
                "federation": federation,
                "site": site,
                "runs": len({charged.cost.run for charged in charges}),
                "patients": int(part.mark_charged_patients().sum()),
                "by_picture": int(part.mark_patients_known_by_picture().sum()),
                "epsilon": _finite_or_none(compute_largest_patient_epsilon(part, delta)),
            }
        )
    return rows


def refuse_over_privacy_budget(site: Site, plan: HospitalPlan, method: SiteMethod, run: str = "") -> None:
    """Refuse a plan if another round of it would exceed the privacy budget of one of the site's patients.

    Args:
        run: Its interrupted round does not count, because it will be resumed with the same patients and noise.

    Raises:
        BadInput: If the budget would be exceeded.
    """
    protection = make_site_privacy_settings(plan, method, site.train_samples)
    if protection is None or site.policy.epsilon is None:
        return
    ledger = open_patient_ledger(site)
    steps = protection.noisy_steps_per_round
    costs = None if ledger is None else ledger.list_costs(run, steps)
    refuse_cost_over_budget(site, costs, steps)


def refuse_cost_over_budget(site: Site, costs: PatientCosts | None, cost: NoisySteps) -> None:
    """Refuse a round with this cost if it would exceed the privacy budget.

    Args:
        costs: The costs of the site's patients; None for a simulated site, which counts the costs in its folder.

    Raises:
        BadInput: If the budget would be exceeded. The coordinator reads the message, so it has no number that depends
            on the patients; the site's own log has the numbers.
    """
    budget = site.policy.epsilon
    delta = site.policy.delta
    if budget is None:
        return
    if costs is None:
        after = open_privacy_ledger(site).compute_total_epsilon(delta, [cost])
        if after <= budget:
            return
        problem = f"another round would bring what all runs have cost to epsilon {after:.2f}; "
        problem += f"this site allows {budget:g}."
    else:
        if _is_largest_patient_epsilon_within(budget, costs, delta, [cost]):
            return
        _report_refused_cost(site, costs, cost, budget)
        problem = f"another round would cost its patients more than this site allows, epsilon {budget:g}."
    raise BadInput([Fault("site.toml: policy.epsilon", problem, "It takes no further part.")])


def _report_refused_cost(site: Site, costs: PatientCosts, cost: NoisySteps, budget: float) -> None:
    """Print the numbers that explain a refusal to the site's own log."""
    assert site.ledger is not None, "the costs come from it"
    delta = site.policy.delta
    spent = compute_largest_patient_epsilon(costs, delta)
    after = compute_largest_patient_epsilon(costs, delta, [cost])
    parts = describe_costs_by_federation(_list_costs_by_federation(costs, delta), costs.patients)
    site.tell(
        f"declined for the privacy budget: epsilon {spent:.2f} of {budget:g} is spent, another round would bring "
        f"it to {after:.2f}; counted in {site.ledger.path}: {'; '.join(parts) or 'nothing'}"
    )
    if sentence := _describe_patients_known_by_picture(site, costs):
        site.tell(sentence)


def _describe_patients_known_by_picture(site: Site, costs: PatientCosts) -> str:
    """Return a sentence for the site's own log about named patients who were recognised only by a picture.

    Uniform pictures are not compared, but a placeholder such as "image not available" counts as a picture.
    """
    names = np.unique(np.concatenate([site.train.patients, site.validation.patients]))
    patients = names[costs.mark_patients_known_by_picture() & ~find_placeholder_patients(names)].tolist()
    if not patients:
        return ""
    shown = list_first_and_count_rest(patients, 3)
    return (
        f"recognised by a picture alone, which a patient of another name had too: {shown}. "
        'If it shows no patient (a card "image not available"), take its file out of the table.'
    )


class UnnoisedChange(BadInput):
    """Raised if a value of the model has changed without noise.

    Such a change depends on the images, so this refusal counts in the privacy budget like a reply.
    """


def refuse_unnoised_change(task: LocalTask, state: ModelState, noisy: Iterable[Tensor] = ()) -> None:
    """Refuse to send the update if a value without noise differs from the received model.

    Args:
        state: The model's values now.
        noisy: The parameters that training with noise has changed; their differences are accepted.

    Raises:
        UnnoisedChange: If any other value differs, for instance a buffer that holds a mean of images.
    """
    layout = make_model_layout(task.network)
    noisy_ids = set(map(id, noisy))
    before, after = (split_state_into_tensors(values, layout) for values in (task.received, state))
    tensors = task.network.state_dict(keep_vars=True)
    changed = [
        name.removeprefix("backbone.")
        for name, values in after.items()
        if id(tensors[name]) not in noisy_ids and not np.array_equal(values, before[name], equal_nan=True)
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
        """The noise and the cost of each round of the run at this site."""
        protection = make_site_privacy_settings(self.plan, self.method, self.site.train_samples)
        assert protection is not None, "this layer is on for plans with privacy only"
        return protection

    def wrap_answer(self, answer: Callable[[TrainRequest], TrainReply], request: TrainRequest) -> TrainReply:
        """Answer a request to train if the privacy budget allows it, and charge the cost.

        If the last request is repeated, return the stored reply.

        Raises:
            BadInput: If the round would exceed the budget, or the number of replies that the plan's noise allows.
        """
        site = self.site
        digest = hash_train_request(request)
        ledger = open_privacy_ledger(site)
        patients = open_patient_ledger(site)
        paid = ledger.find_stored_reply(digest)
        if paid is None:
            paid = self._answer_and_store(answer, request, self._make_cost(request, digest))
        else:
            ledger.write_privacy_cost(paid.cost or self._make_cost(request, digest), once=True)
        if patients is not None:
            patients.spend_costs(ledger.entries)
        if not self.plan.privacy.secure_aggregation:
            # Its cost is charged, so later rounds may start from this state. A masked round must be unmasked first.
            site.open_run_state_folder(request.run).mark_round_settled(request.round, paid.state_hash)
        return paid.reply

    def _make_cost(self, request: TrainRequest, digest: str) -> PrivacyCostEntry:
        steps = self.site_privacy.noisy_steps_per_round
        numbers = (steps.noise_multiplier, steps.sample_rate, steps.count)
        return PrivacyCostEntry(request.run, request.round, digest, *numbers, make_cost_id())

    def _answer_and_store(
        self, answer: Callable[[TrainRequest], TrainReply], request: TrainRequest, cost: PrivacyCostEntry
    ) -> LastStoredReply:
        """Reserve the cost, answer the request, and write reply and cost to the folder.

        Raises:
            BadInput: If the round would exceed the budget, or the number of replies that the plan's noise allows.
        """
        site = self.site
        plan = self.plan
        section = self.plan.privacy
        ledger = open_privacy_ledger(site)
        patients = site.ledger
        if patients is None:
            self._refuse_unaffordable_round(request, cost, None)
        else:
            cost = patients.reserve_cost(cost, partial(self._refuse_unaffordable_round, request, cost))

        before = self._list_run_costs(request.run, None if patients is None else patients.list_costs())
        steps = merge_equal_steps(entry.noisy_steps for entry in {**before, cost.id: cost}.values())
        spent = compute_epsilon(steps, section.delta, section.accountant)
        try:
            reply = answer(request)
        except BaseException as error:
            costs_a_reply = _can_error_depend_on_images(error)
            if costs_a_reply:
                ledger.write_privacy_cost(cost)
            if patients is not None and costs_a_reply:
                patients.spend_cost(cost)
            elif patients is not None:
                self._release_cost(patients, cost)
            raise

        reply = replace(reply, epsilon=_finite_or_none(spent))
        if not site.policy.metrics_outside_privacy:
            # The number of epochs until a loss settles, and the time, depend on the images.
            reply = replace(reply, epochs=plan.training.epochs, seconds=0.0)
        state_hash = site.open_run_state_folder(request.run).read_round_state_hash(request.round)
        paid = LastStoredReply(reply, state_hash, cost)
        ledger.write_reply_and_cost(cost, paid)
        return paid

    def _release_cost(self, patients: PatientLedger, cost: PrivacyCostEntry) -> None:
        """Release a reserved cost; if that fails, it stays counted, and the error that ended the training is raised."""
        try:
            patients.release_cost(cost)
        except (LedgerUnusable, OSError) as failed:
            self.site.tell(f"a round that ended without a reply stays counted for privacy: {failed}")

    def _refuse_unaffordable_round(
        self, request: TrainRequest, cost: PrivacyCostEntry, costs: PatientCosts | None
    ) -> None:
        """Refuse a round if the plan's noise was computed for fewer answers, or if the budget does not suffice.

        Raises:
            BadInput: If the round is refused.
        """
        max_answers = self.plan.run.rounds + self.method.traits.ranks_sites  # the plan's noise was computed for so many
        answers = len(self._list_run_costs(request.run, costs))
        if self.plan.privacy.epsilon is not None and answers >= max_answers:
            problem = f"this run's plan has noise for {max_answers} answers, and this site has given them."
            raise BadInput([Fault("run.rounds", problem, "It takes no further part.")])
        refuse_cost_over_budget(self.site, costs, cost.noisy_steps)

    def _list_run_costs(self, run: str, costs: PatientCosts | None) -> dict[str, PrivacyCostEntry]:
        """Return id -> cost of this site's replies in a run, from the folder and from the patients' ledger."""
        charged = [] if costs is None else [each.cost for each in costs.charged if each.site == self.site.name]
        own = (*open_privacy_ledger(self.site).entries, *charged)
        return {entry.id: entry for entry in own if entry.run == run}

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

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train, then add noise to update and statistics if the plan has noise on updates.

        If the plan has noise in each training step instead, check that nothing else changed the model.

        Raises:
            UnnoisedChange: If evaluation or training changed a value of the model without noise.
        """
        if self.plan.privacy.level != "update":
            refuse_unnoised_change(task, read_model_state(task.network))  # evaluation, before training
            result = train(task, request)
            groups = result.optimizer.param_groups
            learned = [value for group in groups for value in group["params"]]
            refuse_unnoised_change(task, read_model_state(task.network), learned)
            return result
        result = train(task, request)
        noisy = self.site_privacy.make_reply_noise(self._make_noise_source(request))
        update, statistics = noisy(result.update, result.statistics)
        return replace(result, update=update, statistics=statistics)

    def _make_noise_source(self, request: Request) -> NoiseSource:
        site = self.site
        seed = derive_seed(self.plan.run.seed, request.round, site.name, "noise")
        return make_seeded_noise_source(seed) if site.simulated else make_secret_noise_source()


def _can_error_depend_on_images(error: BaseException) -> bool:
    """Return True if an error that ends a training costs as much as a reply: it is sent and may depend on the images.

    A fault of the request itself does not depend on the images. If the program is stopped on request, or the run has
    ended, nothing is sent.
    """
    if isinstance(error, BadInput | WireError):
        return isinstance(error, UnnoisedChange)
    return isinstance(error, Exception | RequestTimeExceeded)


def _finite_or_none(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
