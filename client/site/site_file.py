"""A site's folder and its ``site.toml``: made by ``flwr-client init``, read and checked without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from client.site.policy import TRUST, Policy
from common.config import Plan
from common.data.base.spec import DataSpec
from common.errors import BadInput, Fault, quoted, stop_on
from common.security.identity import (
    SiteKit,
    SiteRequest,
    checked_name,
    fingerprint,
    new_key,
    public_line,
    read_key,
    read_kit,
    same_key,
    write_toml,
)
from common.system.files import atomic_outputs, is_disk_full, is_file, private_folder, write_atomically
from common.system.toml import Section, read_toml, validated

FILE, PLAN_FILE = "site.toml", "plan.json"


class SiteFile(Section):
    """The keys of ``site.toml``; in ``[data]``, ``labels`` and ``synonyms`` stand beside those of the data set.

    Attributes:
        name: As registered with the coordinator.
        kit: What the coordinator sent back; ``NAME.kit`` where left out.
        key: The private key; ``NAME.key`` where left out.
        device: ``auto`` takes a GPU where there is one.
        gpus: How many GPUs each batch is split across.
        policy: What leaves beside updates.
    """

    name: str
    kit: str = ""
    key: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: int = Field(1, ge=1)
    policy: Policy = Policy()
    data: DataSpec = Field(discriminator="kind")

    _name = field_validator("name")(checked_name)


@dataclass(frozen=True)
class Settings:
    """One hospital's folder, read and checked.

    Attributes:
        labels: The classes that the site annotates, by its own names and in its own order; empty for all of the data.
        synonyms: The site's name -> canonical name.
    """

    folder: Path
    file: SiteFile
    labels: tuple[str, ...]
    synonyms: Mapping[str, str]

    @property
    def kit_path(self) -> Path:
        return self.folder / (self.file.kit or f"{self.file.name}.kit")

    @property
    def key_path(self) -> Path:
        return self.folder / (self.file.key or f"{self.file.name}.key")

    @property
    def state(self) -> Path:
        """The folder of what the program itself writes."""
        return self.folder / "state"


def read_file_only(folder: Path) -> Settings:
    """Read ``site.toml`` of a folder; the data it names is not looked at.

    Raises:
        BadInput: With every fault.
    """
    settings, found = read_with_faults(folder)
    stop_on(found)
    return settings


def read_with_faults(folder: Path) -> tuple[Settings, list[Fault]]:
    """Settings, and what is wrong with their class names; of a file with other faults there are no settings.

    Raises:
        BadInput: With every fault, if the folder holds no file or it has a fault elsewhere.
    """
    tree = _read_site_toml(folder)
    data = tree.get("data")
    labels, synonyms = (data.pop("annotates", ()), data.pop("synonyms", {})) if isinstance(data, dict) else ((), {})
    wrong = [*_list_faults(labels), *_map_faults(synonyms)]
    try:
        file = validated(SiteFile, tree, FILE)
    except BadInput as error:
        raise BadInput([*error.faults, *wrong]) from None
    return Settings(folder, file, tuple(labels), synonyms), wrong


def read_credentials(settings: Settings) -> SiteKit:
    """Read the kit, and check that it belongs to this site and to its key.

    Raises:
        BadInput: With every fault.
    """
    faults = list[Fault]()
    try:
        key = read_key(settings.key_path)
    except BadInput as error:
        faults += error.faults
    try:
        kit = _read_kit(settings)
    except BadInput as error:
        faults += error.faults
    stop_on(faults)
    if kit.site != settings.file.name:
        problem = f'is "{settings.file.name}", but the kit is for "{kit.site}".'
        faults.append(Fault(f"{FILE}: name", problem, "A site uses the name it is registered by."))
    if not same_key(kit.public_key, public_line(key, "")):
        problem = f"is not the key that {settings.kit_path.name} was written for."
        faults.append(Fault(settings.key_path.name, problem, "Ask for a kit for this key, or put the old key back."))
    stop_on(faults)
    return kit


def _read_kit(settings: Settings) -> SiteKit:
    if not settings.kit_path.is_file():
        others = sorted(path.name for path in settings.folder.glob("*.kit"))
        problem = f"there is no {settings.kit_path.name} in {settings.folder}."
        if others:
            problem += f" {quoted(others)} is there: the kit of another site, or under another name."
        remedy = f"Send {settings.file.name}.request to the coordinator, who admits it and sends the kit back."
        raise BadInput([Fault(f"{FILE}: kit", problem, remedy)])
    return read_kit(settings.kit_path)


def checked_folder(folder: Path) -> Path:
    """Return the folder, if it is a site's.

    Raises:
        BadInput: If it is not.
    """
    if is_file(folder / FILE):
        return folder
    problem, remedy = f"is no site's folder: it holds no {FILE}.", "Make one with flwr-client init."
    if not folder.exists():
        problem = "there is no such folder."
    elif not folder.is_dir():
        problem, remedy = "is a file; a site's folder is wanted.", f"Name the folder that holds {FILE}."
    raise BadInput([Fault(str(folder), problem, remedy)])


def _read_site_toml(folder: Path) -> dict[str, Any]:
    return read_toml(checked_folder(folder) / FILE)


def _list_faults(labels: Any) -> list[Fault]:
    if isinstance(labels, list | tuple) and all(isinstance(name, str) for name in labels):
        return []
    return [Fault(f"{FILE}: data.annotates", "must be a list of class names.")]


def _map_faults(synonyms: Any) -> list[Fault]:
    if isinstance(synonyms, dict) and all(isinstance(name, str) for name in synonyms.values()):
        return []
    return [Fault(f"{FILE}: data.synonyms", 'must be a table of lines "own name" = "canonical name".')]


# ---------------------------------------------------------------------- the last plan


def keep_plan(state: Path, plan: str) -> None:
    """Keep the plan of a roll call as it came: ``flwr-client check`` checks the site for it."""
    write_atomically(state / PLAN_FILE, plan.encode())


def last_plan(state: Path) -> Plan | None:
    """Return the plan of the last roll call; None where there was none, or it was of another release."""
    try:
        return Plan.model_validate_json((state / PLAN_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


# ---------------------------------------------------------------------- flwr-client init

TEMPLATE = f"""# {TRUST["trusted"]}
# That is level "trusted" in [policy] below; "masked" and "private" trust it with less.

# What this hospital brings to the federation. Paths are relative to this folder.
name = "{{name}}"
# kit = "{{name}}.kit"            # what the coordinator sends back
# device = "auto"               # auto, cpu, cuda
# gpus = 1                      # GPUs that each batch is split across

# One table says where images and labels are. Every key: docs/experiments.md, [data].
# A csv beside a folder of PNG, JPEG or DICOM files:
[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
label_columns = ["Effusion", "Pneumonia"]   # 1 present, 0 absent, blank not annotated
# annotates = ["Effusion"]                  # the classes that count here; all of them where left out

# What this hospital takes part in, and what may leave besides model updates. A level sets the keys below; a key that
# stands here overrides it. What attacks find under each level: docs/privacy.md, "Three levels".
# "trusted": {TRUST["trusted"]}
# "masked":  {TRUST["masked"]}
# "private": {TRUST["private"]}
[policy]
level = "trusted"
# label_counts = true           # false: not how many training images show each class, where the method asks (fedsld)
# score_histograms = true       # false: not how the final model's scores on test and validation images are spread
# training_figures = true       # false: no loss, and no AUROC on the validation images
# test_metrics = true           # false: nothing of how good the model is on the test images
# train_hidden_classes = true   # false: without epsilon, do not train on labels that smallest_count hides
# test_each_round = true        # false: decline runs that test the model here every round
# smallest_count = 10           # nothing of classes that fewer patients show, or fewer do not
# round_counts_to = 1           # counts are rounded down to a multiple of it
# parts = ["trunk", "norm", "head"]         # groups of the network whose change may leave
# statistics = []               # what a method may be told beside; what it declares where left out
# maximum_update_norm = 1.0     # decline runs that do not clip a change to this length, or less
# keep_features = true          # features of a frozen trunk are kept on this disk, encrypted

# Noise and masks:
# epsilon = 10.0                # only runs with privacy, and none beyond this, all together: docs/privacy.md
# delta = 1e-5                  # at which epsilon is counted
# privacy_unit = "image"        # "patient": decline runs whose noise hides only single images
# metrics_outside_privacy = false           # true: figures that no noise covers leave in such runs too
# masked_only = false           # true: send no update but a masked one (secure aggregation)
# smallest_cohort = 3           # under secure aggregation, refuse to unmask a sum of fewer sites
# rows_alone = false            # true: then also head rows of classes that fewer sites have: the coordinator sees them
# peers = {{{{ south = "ecdsa-sha2-nistp256 AAAA..." }}}}   # the sites with which masks are agreed on
# honest_sites = 1              # so many sites of a sum are trusted to add their share of noise: docs/privacy.md

# What runs here:
# methods = ["surgical"]        # all of this release where left out; a plug-in's only if listed
# networks = ["timm:*"]         # networks that are not Polyclinic's own
# losses = []                   # of plug-ins, like the four below: "plugin:NAME"
# metrics = []
# transforms = []
# optimizers = []
# schedules = []

# What a run may cost this machine; a run beyond is declined: docs/what-leaves.md, "The policy"
# maximum_hours = 24            # work on one request; this program stops a longer one
# maximum_run_hours = 720       # work on one run, all requests together
# maximum_rounds = 10000
# maximum_epochs = 500          # local epochs in one round
# maximum_total_epochs = 100000 # local epochs in a whole run
# maximum_batch_size = 4096     # images in a training batch
# maximum_image_size = 1024     # side in pixels to which the network brings images
# maximum_parameters = 200000000
# maximum_classes = 1000
# maximum_memory_gb = "machine" # a number, or "machine" for all that it has, or its GPU
# maximum_disk_gb = 20          # what one run may leave on the disk
# maximum_threads = 64
# maximum_plan_kb = 64
# maximum_method_number = 10000 # largest whole number in a plan's [method]

# Where this hospital's words differ from the federation's:
# [data.synonyms]
# "Fluid" = "Effusion"
"""


def make_site(folder: Path, name: str) -> list[str]:
    """Make what is missing in a site's folder; never over anything.

    Returns:
        Lines for the person who ran it.

    Raises:
        BadInput: If the name cannot be used, or the folder holds a key already.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise BadInput([Fault("--name", f"{error}.")]) from None
    if folder.exists() and not folder.is_dir():
        raise BadInput([Fault(str(folder), "is a file; a site's folder is made here.", "Name another folder.")])
    with atomic_outputs(folder, *(folder / file for file in (f"{name}.key", f"{name}.request", FILE))):
        return _made_site(folder, name)


def _made_site(folder: Path, name: str) -> list[str]:
    if not folder.exists():
        private_folder(folder)
    key_path, request = folder / f"{name}.key", folder / f"{name}.request"
    made = []
    if key_path.exists():
        key = read_key(key_path)
        made.append(f"{key_path} is there already and stays.")
    else:
        try:
            key = new_key(key_path)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise BadInput([Fault(str(key_path), f"cannot be written: {error.strerror}.")]) from None
        made.append(f"{key_path}: this site's private key. It stays here; nobody else needs it.")
    line = public_line(key, name)
    write_toml(request, SiteRequest(site=name, public_key=line), "For the coordinator. Holds no secret.")
    made.append(f"{request}: send this file to the coordinator, who asks you for the fingerprint:")
    made.append(f"    {fingerprint(line)}")
    if (folder / FILE).exists():
        made.append(f"{folder / FILE} is there already and stays.")
    else:
        write_atomically(folder / FILE, TEMPLATE.format(name=name).encode())
        made.append(f"{folder / FILE}: say there where this hospital's images and labels are.")
    made.append(f"The coordinator sends {name}.kit back; put it into {folder} and run: flwr-client start {folder}")
    return made
