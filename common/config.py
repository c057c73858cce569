"""The experiment file: its schema, its reader, and its validation, which reports all faults together.

An experiment is a TOML file. ``extends = "other.toml"`` inherits another file's keys, so that a baseline's file lists
only the differences; ``--set section.key=value`` overrides any key. The coordinator sends hospitals the
:class:`HospitalPlan`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from polyclinic.common import plugins
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.examples import find_experiment_file
from polyclinic.common.models.zoo.spec import (
    MIN_UNET_LEVELS,
    SEGMENTATION_METRICS,
    ModelSpec,
    Sha256,
    is_segmentation,
)
from polyclinic.common.plugins import (
    MAX_PLUGIN_METRICS,
    PLUGIN_PREFIX,
    OrPlugin,
    PluginIdentity,
    PluginName,
    identify_plugin,
)
from polyclinic.common.system.files import is_file
from polyclinic.common.system.packages import is_package_installed
from polyclinic.common.system.plain_text import PLAIN_NAME, is_plain_text
from polyclinic.common.system.toml import TomlSection, parse_toml, read_toml, translate_validation_errors
from polyclinic.common.vocabulary import VocabularyTable, group_words_by_class
from polyclinic.data.base.names import Name
from polyclinic.data.base.pixel_form import check_pixel_table
from polyclinic.data.base.spec import (
    AugmentationSpec,
    DataSpec,
    PictureTableSpec,
    format_image_size,
    inherit_label_settings,
)
from polyclinic.data.partition.spec import ClassListsPartitionSpec, PartitionSpec

Exponent = Annotated[float, Field(ge=0, le=20)]
"""An exponent of the focal or the asymmetric loss."""
MAX_PURPOSE_CHARACTERS = 500
"""Maximum length of a study's purpose; a hospital refuses a plan with a longer one."""


class RunSection(TomlSection):
    """The ``[run]`` table: method, rounds, seed.

    Attributes:
        method: Name of a method, or ``plugin:NAME``.
        rounds: Number of rounds.
        seed: Determines the initial model, the order of images, augmentation, dropout, and the partition unless it has
            a seed of its own.
        name: The run's title in lists, reports and at the hospitals; empty for that of its experiment file.
        purpose: What the study wants to find out, in one line, for the people at the hospitals who approve its plan.
        keep_updates: The coordinator stores every update that it aggregated, so that ``flwr-server verify`` can
            repeat the aggregation; the sites see this setting in the plan.
    """

    method: str
    rounds: int = Field(20, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    name: str = ""
    purpose: str = ""
    keep_updates: bool = False

    @field_validator("purpose")
    @classmethod
    def _check_purpose(cls, text: str) -> str:
        if len(text) > MAX_PURPOSE_CHARACTERS or not is_plain_text(text):
            raise ValueError(
                f"use one line of at most {MAX_PURPOSE_CHARACTERS} characters; hospitals refuse a longer one"
            )
        return text

    @model_serializer(mode="wrap")
    def _leave_out_missing_purpose(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Keep the JSON, and so the hash, of plans without a purpose as it was before this key existed.
        table: dict[str, Any] = serialize(self)
        return table if self.purpose else {key: value for key, value in table.items() if key != "purpose"}


PATCH_TRAINING_KEYS: Final = ("patches_per_volume", "patch_foreground")
"""Keys of ``[training]`` that only a model with ``patch_size`` may have."""


class TrainingSection(TomlSection):
    """The ``[training]`` table: the local training of a site in one round.

    Attributes:
        epochs: Passes over a site's training images in a round.
        batch_size: Images in a batch; with ``model.patch_size`` patches.
        optimizer: The optimiser of a site.
        lr: Learning rate.
        momentum: Momentum of ``sgd``.
        weight_decay: Weight decay of the optimiser.
        reset_optimizer: Start each round with a new optimiser state; otherwise a site stores the state between rounds,
            but never under secure aggregation.
        schedule: The learning rate over the run's rounds; ``cosine`` lets it fall to nearly 0.
        schedule_warm_up: Rounds in which the learning rate first rises in equal steps.
        loss: What a site minimises: ``plain``, the method's own loss; ``focal`` (Lin et al. 2017); ``asymmetric``
            (Ridnik et al. 2021, multi-label only). Validation always uses the plain loss. A method that defines its
            own loss allows ``plain`` only.
        class_weights: Give rare labels at the site more weight. Multi-label: the weight of a positive label is the
            number of the class's known labels divided by the number of its positives. Multi-class: the weight of an
            image is the number of images divided by (number of classes times images of its class).
        focal_gamma: Exponent of the focal loss.
        asymmetric_gammas: Exponents of the asymmetric loss, for positives and for negatives.
        asymmetric_margin: The asymmetric loss subtracts this margin from the predicted probability of a negative.
        clip_gradients: Maximum Euclidean norm of the gradient of a step; None for no clipping.
        gradient_accumulation_steps: Number of batches whose gradients are added up before the weights change; replaces
            one batch that is too large for memory.
        threads: Number of CPU threads at a site; fixed by the experiment, because it changes the rounding of sums.
        precision: ``auto`` is ``bf16`` on a GPU and ``float32`` on a CPU. ``bf16`` on a CPU needs AVX-512 BF16 or AMX,
            else ``float32`` is used. ``fp16`` is for GPUs without bfloat16. With ``fastest`` each site measures the
            combinations of precision and ``memory_format`` and uses the fastest.
        memory_format: torch's memory format of convolution weights and images. Which is faster depends on network and
            CPU; it changes the rounding of sums.
        patches_per_volume: With ``model.patch_size``, patches drawn from each image in an epoch; a batch has
            ``batch_size`` patches.
        patch_foreground: Share of the patches, on average, that are drawn around a pixel of an outlined class; the
            others lie anywhere.
    """

    epochs: int = Field(1, ge=1)
    batch_size: int = Field(64, ge=1)
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], OrPlugin] = "adam"
    lr: float = Field(1e-3, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    reset_optimizer: bool = False
    schedule: Annotated[Literal["constant", "cosine"], OrPlugin] = "constant"
    schedule_warm_up: int = Field(0, ge=0)
    loss: Annotated[Literal["plain", "focal", "asymmetric"], OrPlugin] = "plain"
    class_weights: bool = False
    focal_gamma: float = Field(2.0, ge=0, le=20)
    asymmetric_gammas: tuple[Exponent, Exponent] = (1.0, 4.0)
    asymmetric_margin: float = Field(0.05, ge=0, lt=1)
    clip_gradients: float | None = Field(None, gt=0)
    gradient_accumulation_steps: int = Field(1, ge=1, le=4096)
    threads: int = Field(1, ge=1, le=1024)
    precision: Literal["auto", "float32", "bf16", "fp16", "fastest"] = "auto"
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
    patches_per_volume: int = Field(4, ge=1, le=4096)
    patch_foreground: float = Field(0.5, ge=0, le=1)

    @model_serializer(mode="wrap")
    def _leave_out_default_patches(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Keep the JSON, and so the hash, of plans without patches as it was before these keys existed.
        table: dict[str, Any] = serialize(self)
        defaults = {key: type(self).model_fields[key].default for key in PATCH_TRAINING_KEYS}
        return {key: value for key, value in table.items() if key not in defaults or value != defaults[key]}


class EvaluationSection(TomlSection):
    """The ``[evaluation]`` table: which model is evaluated, when, and on which images.

    Attributes:
        test_each_round: In each round every site also reports the accuracy of the received model on its own test part
            (multi-class tasks), as in FedSLD's paper. The accuracy never selects a model.
        pooled: In the final test, ask every site for histograms of its scores. Those of test images give AUROCs over
            all sites' images, those of validation images give decision thresholds. A hospital's policy can refuse.
        sensitivity: Each class gets two decision thresholds, chosen on the sites' validation images: Youden's, and the
            highest with at least this sensitivity.
        checkpoint: The final model of a run: the ``best`` one on validation, or that of the ``last`` round.
        criterion: The measure that selects the best round: the ``method``'s own criterion, the sites' mean validation
            ``auroc``, or their mean validation ``loss``.
        patience: Early stopping: number of validated rounds in a row without a better model, after which the run
            ends; None for no early stopping.
        sites: Number of sites, drawn by (seed, round), that test the final model; 0 for all. None: all sites, if all
            train in each round; else the larger of 100 and ``sites_per_round``.
        metrics: Names of plug-in metrics, ``plugin:NAME``, computed for each class on test images in addition to our
            own metrics; at most 20.
        sample_grid: The report of a simulation shows some test images; None: only if they are not of real patients.
        compare_local: After the final test every site also trains a model alone and compares it with the federated
            model on its own test part.
    """

    test_each_round: bool = False
    pooled: bool = True
    sensitivity: float = Field(0.9, gt=0, le=1)
    checkpoint: Literal["best", "last"] = "best"
    criterion: Literal["method", "auroc", "loss"] = "method"
    patience: int | None = Field(None, ge=1)
    sites: int | None = Field(None, ge=0)
    metrics: Annotated[tuple[PluginName, ...], Field(max_length=MAX_PLUGIN_METRICS)] = ()
    sample_grid: bool | None = None
    compare_local: bool = False


class ParticipationSection(TomlSection):
    """The ``[participation]`` table: sites of a round, waiting times, and bounds on one site's influence on the model.

    Attributes:
        sites: The members of a run over the network, by the names under which they were admitted; empty for all.
        min_sites: Fewest replies with which a round counts; 0 stands for all sites.
        sites_per_round: Number of sites drawn for a round; 0 stands for all.
        round_deadline_s: Seconds after which a round goes on without the missing sites.
        roll_call_deadline_s: Seconds that the run waits for ``min_sites`` sites before round 1.
        clip: Maximum norm of one site's update, as a multiple of the median norm of the round's updates. ``off``
            switches off this bound, trials of updates and the rollback of a collapsed model.
        largest_share: Maximum weight of one site in the average of a round. Before this limit is applied, a site's
            weight is its share of the images.
        distinct_classes: Classes that the coordinator declares to be distinct. Without this, a class is suspect if its
            name looks like that of another class, or if one hospital alone annotates it.
    """

    sites: tuple[Annotated[str, Field(pattern=f"^{PLAIN_NAME.pattern}$")], ...] = ()
    min_sites: int = Field(0, ge=0)
    sites_per_round: int = Field(0, ge=0)
    round_deadline_s: float = Field(3600.0, gt=0)
    roll_call_deadline_s: float = Field(300.0, gt=0)
    clip: Annotated[float, Field(ge=1)] | Literal["off"] = 3.0
    largest_share: float = Field(1.0, gt=0, le=1)
    distinct_classes: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _check_min_sites(self) -> Self:
        if 0 < self.sites_per_round < self.min_sites:
            sizes = f"min_sites {self.min_sites}, sites_per_round {self.sites_per_round}"
            raise ValueError(f"no round could count: {sizes}")
        return self


STEP_NOISE_LEVELS: Final = ("sample", "patient")
"""Privacy levels at which every training step adds noise (DP-SGD)."""


class PrivacySection(TomlSection):
    """The ``[privacy]`` table: differential privacy at the sites and secure aggregation (docs/privacy.md).

    Attributes:
        level: The unit that differential privacy protects: ``sample``, one training image (DP-SGD); ``patient``, all
            images of one patient; ``update``, all data of a site (noise on its update).
        max_grad_norm: Clipping norm of one image's gradient at level ``sample``; at ``patient``, of the sum over one
            patient's images. All three norms are from 1e-6 to 1e6: near the limits of float32, rounding would make a
            clipped vector longer than its bound.
        max_update_norm, max_statistics_norm: Clipping norms of a site's update and of its statistics for the method,
            at level ``update``.
        noise_multiplier: Standard deviation of the noise divided by the sensitivity (the most that one protected unit
            can change the sum).
        epsilon: Alternative to ``noise_multiplier``: the privacy budget of a site for the whole run, from which each
            site computes its noise.
        delta: The delta for which epsilon is reported.
        accountant: Renyi divergences (``rdp``), or the tighter and slower privacy loss distribution (``prv``).
        secure_aggregation: The coordinator sees only sums of updates.
        max_update_value: Magnitude to which the numbers of an update are clipped under secure aggregation; default
            ``method.clip_update``, or 16.
        noise: At level ``update``: each site adds the full noise (``local``), or, under secure aggregation, its share
            of the noise that the sum needs (``distributed``).
        honest_sites: With distributed noise, the number of sites in a sum that must add their share for epsilon to
            hold; a sum of fewer sites is never unmasked.
    """

    level: Literal["none", "sample", "patient", "update"] = "none"
    max_grad_norm: float = Field(1.0, ge=1e-6, le=1e6)
    max_update_norm: float = Field(1.0, ge=1e-6, le=1e6)
    max_statistics_norm: float = Field(1.0, ge=1e-6, le=1e6)
    noise_multiplier: float | None = Field(None, ge=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    accountant: Literal["rdp", "prv"] = "prv"
    secure_aggregation: bool = False
    max_update_value: float | None = Field(None, ge=1e-6)
    noise: Literal["local", "distributed"] = "local"
    honest_sites: int | None = Field(None, ge=2)

    @property
    def protects_updates(self) -> bool:
        """True if the run uses differential privacy of any level, or secure aggregation."""
        return self.secure_aggregation or self.level != "none"

    @model_validator(mode="after")
    def _check_noise(self) -> Self:
        distributed = self.noise == "distributed"
        if not distributed and self.honest_sites is not None:
            raise ValueError('honest_sites goes with noise = "distributed"')
        if distributed and self.honest_sites is None:
            raise ValueError('noise = "distributed" needs honest_sites: how many sites of a sum add noise at least')
        if distributed and (self.level != "update" or not self.secure_aggregation):
            reason = "a share hides nothing by itself, and DP-SGD adds its noise in each local step"
            raise ValueError(f'noise = "distributed" goes with level = "update" and secure_aggregation: {reason}')
        if distributed and (self.noise_multiplier == 0 or self.max_update_value is not None):
            raise ValueError('noise = "distributed" goes with noise, and with max_update_norm, not max_update_value')
        settings = (self.noise_multiplier is not None) + (self.epsilon is not None)
        if settings != (self.level != "none"):
            raise ValueError("noise_multiplier or epsilon, one of them, goes with a level other than none")
        return self


PATCH_SIDE_BEFORE_PLANNING = 16
"""Side of the patches, in pixels, of a network that is not planned yet."""


class PlanningSection(TomlSection):
    """The ``[planning]`` table: before round 1 the coordinator plans the network from all hospitals' training volumes.

    Attributes:
        kind: The rules: those of nnU-Net (:mod:`polyclinic.common.models.zoo.unet_planning`).
        memory_gb: Memory of the GPU for which the network is planned.
    """

    kind: Literal["nnunet"]
    memory_gb: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 8.0


class SimulationSection(TomlSection):
    """The ``[simulation]`` table: where simulated sites run.

    Attributes:
        backend: Where sites train: in workers of Ray, or one after the other in this process. If an experiment does not
            set it, and Ray is not installed, it is ``inline``.
        workers: Number of sites that train at the same time; 0 chooses by cores, memory and GPUs.
        gpus_per_site: GPUs of each site: a fraction of one, or several, across which each batch is split. ``auto``
            divides the GPUs evenly among the workers; 0 trains on the CPU.
        address: Ray cluster to join, e.g. ``auto`` or ``10.0.0.5:6379``; empty starts Ray on this machine.
        image_cache: Folder in which decoded images stay for later runs; empty for the user's cache folder.
        image_cache_gb: Maximum size of that folder; with 0 each start decodes all images into memory.
    """

    backend: Literal["ray", "inline"] = "ray"
    workers: int = Field(0, ge=0)
    gpus_per_site: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    address: str = ""
    image_cache: str = ""
    image_cache_gb: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] = 100.0

    @field_validator("gpus_per_site")
    @classmethod
    def _check_gpus_per_site(cls, gpus: float | Literal["auto"]) -> float | Literal["auto"]:
        if isinstance(gpus, float) and gpus > 1 and not gpus.is_integer():
            raise ValueError("above 1 it is a whole number of GPUs")
        return gpus

    @property
    def gpus_of_each_site(self) -> float | None:
        """Number of GPUs of each site; None for ``auto``, which divides the machine's GPUs among the workers."""
        return self.gpus_per_site if isinstance(self.gpus_per_site, float) else None

    @property
    def gpus_per_batch(self) -> int:
        """Number of GPUs across which each batch of a site is split."""
        return max(1, int(self.gpus_of_each_site or 0))


PixelTable = Annotated[dict[str, Any], AfterValidator(check_pixel_table)]
"""The ``[pixels]`` table: keys of ``[data]`` by which every site reads its images."""


class Experiment(TomlSection):
    """All tables of an experiment file.

    Attributes:
        planning: Rules by which the network is planned; None if ``model`` and ``training`` determine it completely.
        pixels: How every site reads its images (:func:`polyclinic.data.base.pixel_form.check_pixel_table`). A key that
            it leaves out follows from the model, or is the one that the sites agree on.
        vocabulary: The study's classes, with synonyms and definitions (:mod:`polyclinic.common.vocabulary`).
        data, partition: The data set of a simulation, and its partition over the sites.
        server_data: The coordinator's own images, for validation, for tests, and for methods that train on them.
        external_test: Images of an institution that is no site of the run; the final model is tested on them too.
            Classes, synonyms and other findings that this table leaves out are those of ``data``.
    """

    run: RunSection
    method: dict[str, Any] = Field(default_factory=dict)
    model: ModelSpec
    training: TrainingSection = TrainingSection()
    augmentation: AugmentationSpec = AugmentationSpec()
    evaluation: EvaluationSection = EvaluationSection()
    participation: ParticipationSection = ParticipationSection()
    privacy: PrivacySection = PrivacySection()
    simulation: SimulationSection = SimulationSection()
    planning: PlanningSection | None = None
    pixels: PixelTable | None = None
    vocabulary: VocabularyTable | None = None
    data: DataSpec | None = None
    partition: PartitionSpec | None = None
    server_data: DataSpec | None = None
    external_test: DataSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _inherit_external_label_names(cls, tables: Any) -> Any:
        """Copy settings for classes and findings from ``data`` to ``external_test`` where it does not set them.

        Args:
            tables: The tables of the experiment before validation; anything but a mapping is returned unchanged.
        """
        if not isinstance(tables, Mapping):
            return tables
        external = tables.get("external_test")
        data = tables.get("data")
        if not (isinstance(external, Mapping) and isinstance(data, Mapping)):
            return tables
        return {**tables, "external_test": inherit_label_settings(external, data)}

    @model_validator(mode="after")
    def _translate_partition_list_synonyms(self) -> Self:
        """Replace synonyms in ``[partition.lists]`` by the class names that ``data.synonyms`` gives them."""
        synonyms = getattr(self.data, "synonyms", {})
        if synonyms and isinstance(self.partition, ClassListsPartitionSpec):
            lists = self.partition.lists.items()
            renamed = {site: tuple(dict.fromkeys(synonyms.get(name, name) for name in names)) for site, names in lists}
            self.__dict__["partition"] = self.partition.model_copy(update={"lists": renamed})
        return self

    @model_validator(mode="after")
    def _name_partition_lists_by_vocabulary(self) -> Self:
        """Replace synonyms in ``[partition.lists]`` by the classes of the study's vocabulary."""
        if self.vocabulary and isinstance(self.partition, ClassListsPartitionSpec):
            lists = {
                site: tuple(group_words_by_class(names, self.vocabulary))
                for site, names in self.partition.lists.items()
            }
            self.__dict__["partition"] = self.partition.model_copy(update={"lists": lists})
        return self

    @model_validator(mode="after")
    def _check_tables_together(self) -> Self:
        evaluation = self.evaluation
        participation = self.participation
        if self.privacy.level != "none" and evaluation.checkpoint == "best":
            raise ValueError(
                "with privacy no site need tell its validation loss, and nothing can say which round was best: "
                'set evaluation.checkpoint = "last"'
            )
        if self.privacy.secure_aggregation and participation.largest_share < 1:
            reason = "under secure aggregation each site weighs its own update"
            raise ValueError(f"{reason}: participation.largest_share must be 1")
        for key in ("data", "server_data", "external_test"):
            table = getattr(self, key, None)
            if isinstance(table, PictureTableSpec) and isinstance(table.image_size, tuple) != self.model.takes_volumes:
                needed = "[depth, height, width], of volumes" if self.model.takes_volumes else "one number, of pictures"
                size = format_image_size(table.image_size)
                raise ValueError(f"{key}.image_size must be {needed}, as model.image_size is, got {size}")
        has_patches = self.model.patch_size is not None or self.planning is not None
        if not has_patches and (given := sorted(self.training.model_fields_set.intersection(PATCH_TRAINING_KEYS))):
            raise ValueError(f"training.{given[0]} goes with model.patch_size: without it whole images are trained on")
        if evaluation.test_each_round and self.model.task != "multi_class":
            raise ValueError('evaluation.test_each_round counts right classes: it needs model.task = "multi_class"')
        if evaluation.test_each_round and participation.sites_per_round:
            raise ValueError("evaluation.test_each_round is about all sites: it does not go with sites_per_round")
        return self

    @property
    def model_before_planning(self) -> ModelSpec:
        """The model; before planning, a small network in its place, with which other settings can be checked.

        The default network on whole volumes would fail checks of memory, although nobody will train it.
        """
        if self.planning is None or self.model.strides is not None:
            return self.model
        axes = len(self.model.sides)
        level = (1,) * axes
        small = tuple(min(side, PATCH_SIDE_BEFORE_PLANNING) for side in self.model.sides)
        levels = {"kernel_sizes": (level,) * MIN_UNET_LEVELS, "strides": (level,) * MIN_UNET_LEVELS}
        return self.model.model_copy(update={"patch_size": small, **levels})


class HospitalPlan(TomlSection):
    """The part of an experiment that the coordinator sends to hospitals: method, model and settings, but no data.

    Attributes:
        weights_sha256: Hash of the weights file of the initial model; None if there is no file, and the seed alone
            determines the initial weights.
        planning: The ``[planning]`` table; only in the first roll call, which asks for the fingerprint of the volumes.
            Otherwise None and left out of the JSON.
        pixels: The ``[pixels]`` table of the experiment; left out of the JSON if it is None.
        vocabulary: The ``[vocabulary]`` table of the experiment; left out of the JSON if it is None.
    """

    run: RunSection
    method: dict[str, Any]
    model: ModelSpec
    training: TrainingSection
    augmentation: AugmentationSpec
    evaluation: EvaluationSection = EvaluationSection()
    privacy: PrivacySection = PrivacySection()
    plugins: tuple[PluginIdentity, ...] = ()
    weights_sha256: Sha256 | None = None
    planning: PlanningSection | None = None
    pixels: PixelTable | None = None
    vocabulary: VocabularyTable | None = None

    @model_serializer(mode="wrap")
    def _leave_out_missing_tables(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tables: dict[str, Any] = serialize(self)
        optional = ("planning", "pixels", "vocabulary")
        return {name: table for name, table in tables.items() if name not in optional or table is not None}

    @field_validator("model")
    @classmethod
    def _refuse_path_of_weights(cls, model: ModelSpec) -> ModelSpec:
        # The coordinator could choose any path, and the hospital would open it.
        if model.weights is not None:
            raise ValueError("weights names a file; a plan names weights by their hash alone, in weights_sha256")
        return model

    @property
    def test_metrics(self) -> tuple[str, ...]:
        """The metrics of each class, beyond those of image labels, that a site sends with its test."""
        own = SEGMENTATION_METRICS if is_segmentation(self.model.task) else ()
        return (*own, *self.evaluation.metrics)

    @property
    def keeps_optimizer_state(self) -> bool:
        """True if a site stores its optimiser's state between rounds; never under secure aggregation."""
        has_state = self.training.optimizer != "sgd" or self.training.momentum > 0
        return has_state and not self.training.reset_optimizer and not self.privacy.secure_aggregation


MAX_CACHED_PLAN_CHARACTERS = 2**20
"""Maximum length of a plan that is parsed once and cached; an ordinary plan has some thousand characters."""


def parse_plan_json(text: str) -> HospitalPlan:
    """Parse a plan from its JSON; the result is cached, because every request of a run contains the same plan.

    Raises:
        ValidationError: If the text is not a valid plan.
    """
    if len(text) > MAX_CACHED_PLAN_CHARACTERS:
        return HospitalPlan.model_validate_json(text)
    plan = _parse_and_cache_plan(text)
    return plan.model_copy(update={"method": copy.deepcopy(plan.method)})  # a plug-in may write into its parameters


_parse_and_cache_plan = lru_cache(maxsize=4)(HospitalPlan.model_validate_json)


def make_hospital_plan(experiment: Experiment) -> HospitalPlan:
    """Return the plan of an experiment for its hospitals, with the hash of the weights file in place of the file.

    A planned network is in the tables ``model`` and ``training``, so the plan has no table ``planning``.

    Raises:
        BadInput: If the experiment names a plug-in that is not installed.
    """
    tables = ("run", "method", "training", "augmentation", "evaluation", "privacy", "pixels", "vocabulary")
    shared: dict[str, Any] = {name: getattr(experiment, name) for name in tables}
    model = experiment.model_before_planning.model_copy(update={"weights": None, "weights_sha256": None})
    weights_sha256 = experiment.model.weights_sha256
    return HospitalPlan(
        **shared, model=model, plugins=list_plugin_identities(experiment), weights_sha256=weights_sha256
    )


def list_plugin_identities(experiment: Experiment) -> tuple[PluginIdentity, ...]:
    """Return package, version and hash of each plug-in that an experiment names; plug-ins must be installed.

    Raises:
        BadInput: If a plug-in is not installed.
    """
    names = [(plugins.METHODS, experiment.run.method), (plugins.MODELS, experiment.model.architecture)]
    names += [(plugins.LOSSES, experiment.training.loss), (plugins.OPTIMIZERS, experiment.training.optimizer)]
    names += [(plugins.SCHEDULES, experiment.training.schedule)]
    names += [(plugins.TRANSFORMS, experiment.augmentation.transform or "")]
    names += [(plugins.METRICS, metric) for metric in dict.fromkeys(experiment.evaluation.metrics)]
    return tuple(
        identify_plugin(group, name.removeprefix(PLUGIN_PREFIX))
        for group, name in names
        if name.startswith(PLUGIN_PREFIX)
    )


@dataclass(frozen=True)
class ExperimentFile:
    """An experiment with the path of its file; relative paths in the experiment start from the file's folder."""

    experiment: Experiment
    path: Path

    @property
    def base_folder(self) -> Path:
        return self.path.parent

    def with_run_name(self, resumed: Mapping[str, Any] | None = None) -> "ExperimentFile":
        """Return the experiment with a name for its run: ``run.name``, or the default name.

        Args:
            resumed: Experiment, as JSON, of the run that is resumed; its name is then the default. None for a new run,
                whose
                default name is that of the file.
        """
        run = self.experiment.run
        default = self.path.stem if resumed is None else str(resumed.get("run", {}).get("name", ""))
        named = run.model_copy(update={"name": run.name or default})
        return replace(self, experiment=self.experiment.model_copy(update={"run": named}))


FindFaults = Callable[[Mapping[str, Any]], Sequence[Fault]]
"""A function that returns the faults of an experiment's tables."""


def read_experiment(
    path: Path, overrides: Iterable[str] = (), method_faults: FindFaults = lambda tree: ()
) -> ExperimentFile:
    """Read and validate an experiment file, with the files that it extends and ``key=value`` overrides.

    Args:
        method_faults: Returns the faults of the table ``[method]``; called only if other tables have faults, so that
            all are reported together.

    Raises:
        BadInput: With all faults of the files and the overrides.
    """
    tree, base_of_paths = read_experiment_tables(path)
    return validate_experiment(tree, base_of_paths, overrides, method_faults, base_of_paths.name)


def _add_example_of_method(fault: Fault) -> Fault:
    """Return the fault with an example as its remedy if it is about a missing method; any other fault unchanged."""
    if not fault.where.endswith("run.method") or fault.problem != "is missing.":
        return fault
    return replace(fault, remedy='Name one, such as run.method = "surgical"; in Python {"run.method": "surgical"}.')


def validate_experiment(
    tree: dict[str, Any],
    base_of_paths: Path,
    overrides: Iterable[str] = (),
    method_faults: FindFaults = lambda tree: (),
    name: str = "experiment",
) -> ExperimentFile:
    """Apply ``key=value`` overrides to the parsed tables of an experiment, and validate them.

    The override ``scale=small`` replaces keys by those in the table ``[small]``.

    Args:
        tree: The parsed tables.
        base_of_paths: Path of a file, which need not exist; relative paths start in its folder.
        overrides: Texts such as ``run.rounds=3``.
        method_faults: Returns the faults of the table ``[method]``; called only if other tables have faults, so that
            all are reported together.
        name: Name of the experiment in faults.

    Raises:
        BadInput: With all faults.
    """
    small_scale_table = tree.pop("small", None)
    scale = "full"
    key_overrides = list[str]()
    faults = list[Fault]()
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() == "scale":
            scale = value.strip().strip("\"'")
        else:
            key_overrides.append(text)
    if scale == "small" and isinstance(small_scale_table, dict):
        tree = _merge_experiment_tables(tree, small_scale_table)
    elif scale != "full":
        unknown = f'there is no scale "{scale}"; there are full and small.'
        faults.append(Fault(f"{name}: scale", "has no [small] table." if scale == "small" else unknown))
    faults += [fault for text in key_overrides for fault in _apply_key_override(tree, text)]
    _choose_backend_without_ray(tree)
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        faults += map(_add_example_of_method, translate_validation_errors(error, Experiment, name, extra=("extends",)))
        faults += [replace(fault, where=f"{name}: {fault.where}") for fault in method_faults(tree)]
        raise BadInput(faults) from None
    raise_faults(faults)
    return ExperimentFile(experiment, base_of_paths)


def _choose_backend_without_ray(tree: dict[str, Any]) -> None:
    """Set ``simulation.backend`` to ``inline``, in place, if it is not set and Ray is not installed.

    Both backends train the same model.
    """
    section = tree.get("simulation", {})
    if isinstance(section, dict) and "backend" not in section and not is_package_installed("ray"):
        tree["simulation"] = {**section, "backend": "inline"}


def read_experiment_tables(path: Path, children: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Path]:
    """Read the tables of an experiment file, merged with those of the file that it extends, without validation.

    A command can call this function before it imports torch, so that a wrong path is reported at once.

    Args:
        path: The experiment file, or the name of an example.
        children: Files that extend this file, directly or through another file, to detect a cycle; empty for a caller.

    Returns:
        The merged tables, and the file's path; relative paths in the tables start in its folder.

    Raises:
        BadInput: If a file is missing, is not TOML, or extends itself.
    """
    # Check is_file first: resolve() does not end for symbolic links in a loop.
    if is_file(path) and path.resolve() in children:
        raise BadInput([Fault(f"{path.name}: extends", "the files extend one another in a circle.")])
    if not children:
        path = find_experiment_file(path)
    tree = read_toml(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree, path
    if not isinstance(parent, str) or not parent or Path(parent).name != parent or "\0" in parent:
        raise BadInput([Fault(f"{path.name}: extends", "must name a file in the same folder.", "")])
    if not is_file(path.parent / parent):
        raise BadInput([Fault(f"{path.name}: extends", f'names "{parent}", and there is no such file beside it.')])
    inherited, _ = read_experiment_tables(path.parent / parent, (*children, path.resolve()))
    if isinstance(small := inherited.get("small"), dict):
        # A small scale for another method or another kind of data does not fit the file that extends this one.
        deciders = {"method": ("run", "method"), "data": ("data", "kind"), "partition": ("partition", "kind")}
        for table, decider in deciders.items():
            if _get_table_entry(tree, *decider) not in (None, _get_table_entry(inherited, *decider)):
                small.pop(table, None)
    return _merge_experiment_tables(inherited, tree), path


def _get_table_entry(tree: Mapping[str, Any], table: str, key: str) -> object:
    entries = tree.get(table)
    return entries.get(key) if isinstance(entries, Mapping) else None


def _merge_experiment_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the keys of ``above``, also in subtables; a subtable of another ``kind`` replaces the old
    one.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        keeps_kind = both and value.get("kind", old.get("kind")) == old.get("kind")  # type: ignore[union-attr]
        merged[key] = _merge_experiment_tables(old, value) if keeps_kind else value  # type: ignore[arg-type]
    return merged


def _apply_key_override(tree: dict[str, Any], text: str) -> list[Fault]:
    """Apply ``section.key=value`` to the tables in place, and return faults; the value ``none`` removes the key."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        return [Fault(f"--set {text}", "must be section.key=value, for instance run.rounds=3.")]
    *sections, last = key.strip().split(".")
    table = tree
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            return [Fault(f"--set {text}", f'"{section}" is not a table.')]
    if value.strip() == "none":
        table.pop(last, None)
        return []
    try:
        table[last] = parse_toml(f"value = {value.strip()}")["value"]
    except ValueError:
        table[last] = value.strip()
    return []
