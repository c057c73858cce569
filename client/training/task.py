"""A request prepared for work at a site: the network with the received model, the images, and the stored state."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.client.site.memory import LostRoundState, SiteRoundState, SiteRoundStateFolder
from polyclinic.client.site.site import Site
from polyclinic.client.training.features import NeckAndHeadOnFeatures, get_site_feature_cache, trains_on_cached_features
from polyclinic.client.training.figures import UNRESTRICTED_METRICS, RequestedMetricsComputer
from polyclinic.common.config import HospitalPlan, parse_plan_json
from polyclinic.common.errors import WireError, quote_names
from polyclinic.common.models.gpu import move_network_to_device, split_batches_across_gpus
from polyclinic.common.models.network import (
    MemoryFormat,
    SplitNetwork,
    build_network,
    compute_logits,
    make_dense_layer,
    set_memory_format,
    unfreeze_network,
)
from polyclinic.common.models.parts import iterate_parameters
from polyclinic.common.models.state import FrozenPart, ModelState, write_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import (
    Arrays,
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Request,
    TrainReply,
    TrainRequest,
    make_empty_arrays,
)
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import ImageTensors, select_input_rows
from polyclinic.strategies.local.arithmetic import copy_with_number_format
from polyclinic.strategies.local.objective import LabelledExamples, pair_pixels_with_labels, read_in_patches
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import (
    EpochTrainer,
    ValidationMetrics,
    judge_logits,
    make_training_reproducible,
    validate_network,
)
from polyclinic.strategies.registry import get_cached_site_method


@dataclass(frozen=True)
class LocalTask:
    """One request with everything that a site needs to answer it.

    Attributes:
        network: The network to train: the whole network, or only neck and head on features of a frozen backbone.
        whole: The whole network from pixels to logits, with the same neck and head.
        received: The received model, completed by the parts that never leave this site.
        folder: Folder of the run's stored states at the site.
        round_state: The site's state after the last round that counted.
        warms_up: True if warm-up epochs come first, because no reply of this site has counted yet.
        figures: Computes the metrics that the reply may contain.
        validation_chooses: True if the validation loss decides which epoch is kept, in warm-up and if a method trains
            until its loss settles; False if the training loss decides.
        epoch: Function that trains one epoch in place of the usual training loop; None for the usual loop.
        arithmetic: Description of number formats, kernels and GPUs for the reply.
    """

    site: Site
    plan: HospitalPlan
    method: SiteMethod
    network: SplitNetwork
    whole: SplitNetwork
    received: ModelState
    folder: SiteRoundStateFolder
    round_state: SiteRoundState
    warms_up: bool
    figures: RequestedMetricsComputer = UNRESTRICTED_METRICS
    validation_chooses: bool = True
    epoch: EpochTrainer | None = None
    arithmetic: str = ""
    _examples: dict[str, LabelledExamples] = field(default_factory=dict)
    _logits: dict[str, Tensor] = field(default_factory=dict)

    def make_labelled_examples(self, part: str) -> LabelledExamples:
        """Return the images of ``train`` or ``validation``, with labels for the network's head rows."""
        if part not in self._examples and self.site.has_no_limits and self.network is self.whole:
            self._examples[part] = self._get_cached_examples(part)
        if part not in self._examples:
            site = self.site
            inputs = self.prepare_network_inputs(part)
            images: ImageSet = (
                getattr(site, part) if site.has_no_limits else site.get_images_to_train_on(part, self.plan)
            )
            if part == "train" and not site.has_no_limits and (rows := site.find_rows_to_train_on(images)) is not None:
                images = images.select_rows(rows)
                inputs = select_input_rows(inputs, rows)
            self._examples[part] = pair_pixels_with_labels(images, inputs, self.network.class_names)
        if part == "train" and self._examples[part].sampling is None:
            self._examples[part] = read_in_patches(self._examples[part], self.plan.model, self.plan.training)
        return self._examples[part]

    def _get_cached_examples(self, part: str) -> LabelledExamples:
        """Return the part's images with labels from the site's cache, because they are the same in each request."""
        images = getattr(self.site, part)
        class_names = self.network.class_names
        cached: dict[tuple[str, tuple[str, ...]], tuple[ImageSet, LabelledExamples]]
        cached = self.site.computed_results_cache.setdefault("examples", {})
        entry = cached.get((part, class_names))
        # A copy of the site may share the cache and have other images.
        if entry is None or entry[0] is not images:
            entry = images, pair_pixels_with_labels(images, self.site.pixels[part], class_names)
            cached[part, class_names] = entry
        return entry[1]

    def prepare_network_inputs(self, part: str) -> Tensor | ImageTensors:
        """Return the network's inputs for one part of the data: pixels, or features of a frozen backbone."""
        pixels = self.site.pixels[part]
        if self.network is self.whole:
            return pixels
        return get_site_feature_cache(self.site).get_or_compute_features(self.whole, part, pixels, self.plan)

    def use_seed_of(self, *purpose: object) -> AbstractContextManager[torch.Generator]:
        """Return a context manager in which all random numbers follow from the run's seed and ``purpose``.

        Args:
            purpose: Names and numbers that distinguish this use of the seed, such as round and site.
        """
        return make_training_reproducible(derive_seed(self.plan.run.seed, *purpose), self.plan.training.threads)

    def validate_current_network(self) -> ValidationMetrics:
        """Validate the current network; the AUROC leaves out hidden classes."""
        hidden = () if self.site.has_no_limits else self.site.hidden_classes("validation")
        examples = self.make_labelled_examples("validation")
        self.forget_logits()
        if not examples.has_known_labels:
            return ValidationMetrics()
        if examples.masks is not None:  # the logits of all pixels would not fit into memory
            return validate_network(self.network, examples, self.method.loss, self.plan.training, hidden)
        logits = compute_logits(self.network, examples.images, self.plan.training.precision)
        self._logits["validation"] = logits
        return judge_logits(self.network, logits, examples, self.method.loss, hidden)

    def get_or_compute_logits(self, part: str) -> Tensor:
        """Return the network's logits for one part of the data; logits of the last validation are cached."""
        logits = self._logits.get(part)
        if logits is None:
            logits = compute_logits(self.network, self.prepare_network_inputs(part), self.plan.training.precision)
        return logits

    def forget_logits(self) -> None:
        """Clear the cached logits of the last validation, because the network changes."""
        self._logits.clear()


@dataclass(frozen=True)
class LocalTrainingResult:
    """The result of a site's training in one round.

    Attributes:
        parts: The trained model groups that stay at the site: parts of the model, or a whole model of the site.
        train_loss: Mean batch loss of the last epoch; None if it may not leave.
        method_state: Arrays that the method stores at this site for its next round.
        statistics: Arrays that the method sends in addition to the update.
        update: Trained minus received model.
        unsent: Rounding error of this update, which is added to the next update.
        own_optimizer: State of the optimiser of the site's own model, if there is one.
    """

    parts: ModelGroups
    train_loss: float | None
    epochs: int
    optimizer: torch.optim.Optimizer
    method_state: Arrays
    statistics: Arrays
    update: ModelGroups
    unsent: ModelGroups = field(default_factory=ModelGroups)
    own_optimizer: Arrays = field(default_factory=make_empty_arrays)


TrainStep = Callable[[LocalTask, TrainRequest], LocalTrainingResult]
"""Function that trains the received model of a prepared task."""
EvaluateStep = Callable[[LocalTask, EvaluateRequest], EvaluateReply]
"""Function that evaluates the received model of a prepared task."""


class SiteRoundLayer:
    """Base class of a layer around a site's round, such as noise or masks; the base class itself changes nothing.

    Each ``wrap_`` method receives a step and calls it, as a Flower mod does. A run has only the layers that its plan
    and the site's policy turn on.
    """

    def wrap_answer(self, answer: Callable[[TrainRequest], TrainReply], request: TrainRequest) -> TrainReply:
        """Answer a request to train by calling ``answer``; subclasses wrap the whole round."""
        return answer(request)

    def adapt_task(self, task: LocalTask, request: Request) -> LocalTask:
        """Return the prepared task, which subclasses change before the work begins."""
        return task

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train by calling ``train``; subclasses change the result before the site stores its state."""
        return train(task, request)

    def wrap_evaluation(self, evaluate: EvaluateStep, task: LocalTask, request: EvaluateRequest) -> EvaluateReply:
        """Evaluate by calling ``evaluate``; subclasses change the reply."""
        return evaluate(task, request)


@dataclass(frozen=True)
class SiteAdaptedPlan:
    """A run's plan, adapted to one site.

    Attributes:
        plan: The plan, with this site's number formats and kernels.
        method: The site's half of the plan's method.
        arithmetic: Description of number formats, kernels and GPUs for replies.
    """

    plan: HospitalPlan
    method: SiteMethod
    arithmetic: str


def adapt_plan_to_site(site: Site, text: str) -> SiteAdaptedPlan:
    """Parse a plan from JSON and choose this site's number formats; cache the result for later requests."""
    read: tuple[str, SiteAdaptedPlan] | None = site.computed_results_cache.get("plan")
    if read is None or read[0] != text:
        plan = parse_plan_json(text)
        arithmetic = site.choose_arithmetic_for_plan(plan)
        described = f"{arithmetic}, {site.gpus} GPUs" if site.gpus > 1 else str(arithmetic)
        read = (
            text,
            SiteAdaptedPlan(
                copy_with_number_format(plan, arithmetic), get_cached_site_method(site.name, text), described
            ),
        )
        site.computed_results_cache["plan"] = read
    return read[1]


def prepare_local_task(site: Site, request: Request, layers: Sequence[SiteRoundLayer] = ()) -> LocalTask:
    """Prepare the work on a request: fill the network with the received model and the parts that stay at the site.

    Args:
        layers: Layers that change the work on the request, the outermost first.

    Raises:
        BadInput: If the site has too few patients to take part.
        WireError: If the method requires the site's own head rows and the request has others; if the frozen part is
            missing or does not fit the plan; or if masks or noise protect the update and training would not start from
            an earlier round.
        LostRoundState: If the site's stored state is lost; a hospital continues without it from the next request.
    """
    if not site.has_no_limits:
        site.refuse_too_few_patients()

    site_plan = adapt_plan_to_site(site, request.plan)
    site_classes = site.declaration.canonical_names
    plan = site_plan.plan
    method = site_plan.method
    # In a test of exclusive areas, the head rows of other sites' classes compete with this site's rows.
    with_rivals = isinstance(request, EvaluateRequest) and request.test and method.parts.tests_all_rows
    holds_own = set(site_classes) <= set(request.class_names) if with_rivals else request.class_names == site_classes
    if method.payload.rows == "own" and not holds_own:
        raise WireError(
            f"the request has head rows {quote_names(request.class_names)}, this site has {quote_names(site_classes)}."
        )

    folder = site.open_run_state_folder(request.run)
    is_protected = plan.privacy.protects_updates
    is_train_request = isinstance(request, TrainRequest)
    if is_protected and is_train_request and request.counted >= max(request.round, 1):
        # Training would overwrite that state, so the site could not prove later from which state it started.
        raise WireError(f"round {request.round} is to go on from round {request.counted}, which is not before it.")

    expected = method.stores_site_state(plan) and (is_train_request or method.parts.keeps_local_parts)
    try:
        round_state = folder.read_last_counted_state(
            request.counted, forget=is_train_request, settled=is_protected, expected=expected
        )
    except LostRoundState as lost:
        site.tell(str(lost))
        if (
            is_train_request and not site.simulated
        ):  # the coordinator learns of it by this round's error, and the site goes on
            folder.store_empty_state(request.counted)
        raise

    cache = get_cached_networks(plan.model, site.device, site.gpus)
    trunk_in_network = cache.trunk_source
    network = get_unfilled_network(plan.model, request.class_names, site.device, site.gpus, plan.training.memory_format)
    if network.frozen or plan.model.frozen_sha256 is not None or request.frozen.trunk is not None:
        fill_frozen_part(network, site, request.frozen)

    # A whole model of the site's own is loaded for its training and for the test alone.
    local = ModelGroups() if method.traits.trains_own_model else round_state.parts
    whole = local.fill_missing_model_groups(request.model).to_model()
    received = replace(whole, head=whole.head.select_rows(request.class_names))
    source = _find_received_bytes(received.trunk)
    is_trunk_there = source is not None and source is trunk_in_network
    trunk = None if is_trunk_there else received.trunk
    write_model_state(network, trunk=trunk, norm=received.norm, head=received.head)
    if site.simulated and not is_train_request and not method.parts.keeps_local_parts:
        cache.trunk_source = source

    trained = NeckAndHeadOnFeatures(network) if network.frozen and trains_on_cached_features(plan, method) else network
    task = LocalTask(
        site,
        plan,
        method,
        trained,
        network,
        received,
        folder,
        round_state,
        warms_up=request.counted == 0,
        arithmetic=site_plan.arithmetic,
    )

    for layer in layers:
        task = layer.adapt_task(task, request)
    return task


def _find_received_bytes(trunk: NDArray[np.float32]) -> object:
    """Return the object that owns the bytes of a received trunk; None if unknown.

    Two messages with the same object have the same trunk. In a simulation in one process, the object is the
    coordinator's array, which is never changed in place.
    """
    base: object = trunk.base
    if isinstance(base, memoryview):
        return base.obj if base.readonly else None
    return base if isinstance(base, bytes) else None


# ---------------------------------------------------------------------- the network of this process


@dataclass
class NetworkCache:
    """The networks of this process for one model, one for each list of class names; they share backbone and neck.

    Attributes:
        by_rows: Class names of the head rows -> network.
        frozen_sha256: Hash of the frozen part in the backbone; empty if it is not filled yet.
        memory_format: Memory format of the convolutions.
        trunk_source: Owner of the bytes of the trunk in the network, if the network was only evaluated since; else
            None. In a simulation in one process all sites evaluate the same bytes, so the trunk is copied only once.
    """

    by_rows: dict[tuple[str, ...], SplitNetwork] = field(default_factory=dict)
    frozen_sha256: str = ""
    memory_format: MemoryFormat = "channels_last"
    trunk_source: object = None


@lru_cache(maxsize=1)
def get_cached_networks(spec: ModelSpec, device: str, gpus: int) -> NetworkCache:
    """Return the networks of this model; the networks of an earlier model are dropped to save memory."""
    network = move_network_to_device(build_network(spec, ("",), seed=0), device)
    split_batches_across_gpus(network.backbone, gpus)
    return NetworkCache({(): network})


def get_unfilled_network(
    spec: ModelSpec, class_names: tuple[str, ...], device: str, gpus: int = 1, memory_format: MemoryFormat | None = None
) -> SplitNetwork:
    """Return a cached network with arbitrary parameters, which the caller must set.

    The network is cached because drawing the initial weights of a ResNet-18 takes longer than training on ten images.

    Args:
        gpus: Number of GPUs that share each batch, if the device is ``cuda``.
        memory_format: Memory format of the convolutions; None to leave it.
    """
    cache = get_cached_networks(spec, device, gpus)
    cache.trunk_source = None  # the caller may change the network
    networks = cache.by_rows
    if memory_format not in (None, cache.memory_format):
        set_memory_format(networks[()], memory_format)  # all networks share this backbone and neck
        cache.memory_format = memory_format
    if class_names not in networks:
        networks[class_names] = make_network_with_new_head(networks[()], class_names, device)
    network = networks[class_names]
    unfreeze_network(network)
    for parameter in iterate_parameters(network):
        parameter.grad = None
    return network


def make_network_with_new_head(network: SplitNetwork, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    """Return a network with the same backbone and neck, and a new head of unset values with a row for each class."""
    rows = len(class_names)
    features = network.head.in_features
    head = make_dense_layer(torch.empty(rows, features, device=device), torch.empty(rows, device=device))
    return network.with_head(class_names, head).to(device)


def fill_frozen_part(network: SplitNetwork, site: Site, sent: ModelGroups) -> None:
    """Fill the frozen part of a network of :func:`get_unfilled_network`, from the request or from the site's disk.

    Args:
        sent: Arrays of the request. ``trunk`` is the frozen part, or None if the coordinator did not send it.

    Raises:
        WireError: If the frozen part is neither sent nor on disk, or is not the one that the plan names.
        ValueError: If the frozen part is of another network.
    """
    if (sha256 := network.spec.frozen_sha256) is None:
        if network.frozen or sent.trunk is not None:
            raise WireError("the plan does not name the frozen part of its model.")
        return
    if sent.trunk is not None:
        site.frozen_part_files.store_received_frozen_part(FrozenPart(sent.trunk), sha256)
    cache = get_cached_networks(network.spec, site.device, site.gpus)
    if cache.frozen_sha256 != sha256:
        site.frozen_part_files.read_frozen_part(sha256).write_to_network(network)
        cache.frozen_sha256 = sha256
