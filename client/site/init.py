"""``flwr-client init``: the key pair, the request, and a site.toml to be filled in."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from client.site.policy import TRUST
from client.site.site_file import FILE
from common.errors import BadInput, Fault
from common.security.identity import SiteRequest, checked_name, fingerprint, new_key, public_line, read_key, write_toml
from common.system.files import atomic_outputs, no_room, private_folder, write_atomically

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


def prepare(folder: Path, name: str) -> list[str]:
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
        return _prepared(folder, name)


def _prepared(folder: Path, name: str) -> list[str]:
    if not folder.exists():
        private_folder(folder)
    key_path, request = folder / f"{name}.key", folder / f"{name}.request"
    made = []
    if key_path.exists():
        key = read_key(key_path)
        made.append(f"{key_path} is there already and stays.")
    else:
        key = _made_key(key_path)
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


def _made_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        return new_key(path)
    except OSError as error:
        if no_room(error):
            raise
        raise BadInput([Fault(str(path), f"cannot be written: {error.strerror}.")]) from None
