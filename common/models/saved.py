"""Save and load a model as two files: ``model.safetensors`` (tensors) and ``model.json`` (description)."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import safetensors.numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.network import SplitNetwork, build_network, make_dense_layer
from polyclinic.common.models.size_limit import NetworkTooLarge, limit_network_bytes
from polyclinic.common.models.sliding_window import describe_sliding_window
from polyclinic.common.models.state import (
    Array,
    FrozenPart,
    ModelStateLayout,
    hash_model_state,
    join_tensors_into_state,
    list_frozen_tensors,
    make_model_layout,
    read_model_state,
    write_model_state,
)
from polyclinic.common.models.weights import CLASS_NAMES_KEY, MODEL_KEY, PIXELS_KEY, RUN_METADATA_KEY, UNLEARNED_KEY
from polyclinic.common.models.zoo.spec import (
    DESCRIPTION_FILE,
    TENSORS_FILE,
    ModelSpec,
    Sha256,
    make_unreadable_model_fault,
)
from polyclinic.common.plugins import PLUGIN_PREFIX, is_local_plugin_name
from polyclinic.common.system.files import (
    open_input_file,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_bytes
from polyclinic.common.system.toml import describe_validation_error
from polyclinic.common.vocabulary import Vocabulary, VocabularyTable
from polyclinic.data.base.pixel_form import PixelForm

MAX_MEMORY_FACTOR = 4
"""Limit on a network's memory while it is built, as a multiple of its file, because a layer may be replaced or get
low-rank factors."""
EXTRA_MEMORY_BYTES = 256 * 2**20
"""Further memory for tensors that are not saved, such as a classifier that is removed."""
_COPY_BOTH_FILES_REMEDY = f"Copy {DESCRIPTION_FILE} and {TENSORS_FILE} again, both from the run that wrote them."


class SavedModelDescription(BaseModel):
    """The content of ``model.json``.

    Attributes:
        format_version: Version of this file's format.
        model: Specification of the network, with mean and std filled in; ``weights`` is None, because
            ``model.safetensors`` contains all tensors.
        class_names: Class names of the head's rows.
        preprocessing: Preparation of pixels in words, for a person who has only this file.
        label_contract_sha256: Hash of the run's label contract; empty if there was none.
        initial_weights_sha256: Hash of the pretrained weights file, if the experiment named the hash.
        safetensors_sha256: Hash of the file ``model.safetensors``.
        model_sha256: Hash of the tensors' values, see :func:`polyclinic.common.models.state.hash_model_state`.
        pixels: Pixel form of the training images; None if unknown.
        unlearned: Class that the model has not learned -> reason; None if unknown.
        maybe_unlearned: Classes that the model may not have learned.
        vocabulary: Synonyms and definitions of the classes, if the study had a vocabulary.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    model: ModelSpec
    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    preprocessing: str
    label_contract_sha256: str
    initial_weights_sha256: Sha256 | None
    safetensors_sha256: Sha256
    model_sha256: Sha256
    pixels: PixelForm | None = None
    unlearned: dict[str, str] | None = None
    maybe_unlearned: tuple[str, ...] = ()
    vocabulary: VocabularyTable | None = None

    @model_validator(mode="after")
    def _check_is_self_contained(self) -> Self:
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("class_names must differ")
        if self.model.weights is not None:
            raise ValueError("model.weights must be null: the tensors are in the file beside this one")
        return self


def save_model(
    folder: Path,
    network: SplitNetwork,
    *,
    label_contract_sha256: str,
    pixels: PixelForm | None = None,
    unlearned: Mapping[str, str] | None = None,
    maybe_unlearned: tuple[str, ...] = (),
    vocabulary: Vocabulary | None = None,
    private: bool = False,
) -> SavedModelDescription:
    """Save a network as two files, each written atomically, tensors first; return the content of ``model.json``.

    Each saved model needs its own folder, because a crash between the two files leaves files that :func:`load_model`
    rejects.

    Args:
        folder: Destination folder.
        network: The network.
        label_contract_sha256: Hash of the run's label contract.
        pixels: Pixel form of the training images; None if unknown.
        unlearned: Class that the model has not learned -> reason; None if unknown.
        maybe_unlearned: Classes that the model may not have learned.
        vocabulary: The study's vocabulary; only the entries of the network's classes are saved.
        private: True if only the owner may read the files, because the model belongs to one hospital.
    """
    layout = make_model_layout(network)
    model_sha256 = hash_model_state(read_model_state(network), layout)
    normal = network.spec.normalisation
    spec = network.spec
    axes = "height x width"
    resize = "bilinear antialiased"
    if spec.takes_volumes:
        axes = "depth x height x width"
        resize = "trilinear"
    steps = f"{resize} resize to {' x '.join(map(str, spec.sides))}"
    if spec.patch_size is not None:
        steps = f"{describe_sliding_window(spec)}, without a resize"
    kind = "grey (luminance of coloured images)" if network.spec.channels == 1 else "RGB (grey images repeated)"
    model = network.spec.model_copy(
        update={"weights": None, "weights_sha256": None, "mean": normal.mean, "std": normal.std}
    )
    about: dict[str, Any] = {MODEL_KEY: model.model_dump(mode="json"), CLASS_NAMES_KEY: network.class_names}
    about |= {PIXELS_KEY: pixels.model_dump(mode="json")} if pixels else {}
    about |= {UNLEARNED_KEY: list(unlearned)} if unlearned else {}
    # Use a single entry, because safetensors writes several entries in random order, which would change the bytes.
    metadata = {RUN_METADATA_KEY: json.dumps(about, sort_keys=True)}
    content = safetensors.numpy.save(_list_saved_arrays(network, layout), metadata)
    saved = SavedModelDescription(
        model=model,
        class_names=network.class_names,
        preprocessing=f"pixels 0..255, {kind}, batch x channels x {axes}; then, inside the network: {steps}, "
        f"then (pixel / 255 - mean) / std per channel",
        label_contract_sha256=label_contract_sha256,
        initial_weights_sha256=network.spec.weights_sha256,
        safetensors_sha256=hashlib.sha256(content).hexdigest(),
        model_sha256=model_sha256,
        pixels=pixels,
        unlearned=None if unlearned is None else dict(unlearned),
        maybe_unlearned=maybe_unlearned,
        vocabulary={name: vocabulary[name] for name in network.class_names if name in vocabulary}
        if vocabulary
        else None,
    )
    write_atomically(folder / TENSORS_FILE, content, private=private)
    write_atomically(folder / DESCRIPTION_FILE, (saved.model_dump_json(indent=2) + "\n").encode(), private=private)
    return saved


def _list_saved_arrays(network: SplitNetwork, layout: ModelStateLayout) -> dict[str, Array]:
    """Return name -> values of all trained and frozen tensors; float32 tensors on the CPU are not copied.

    Trained tensors are saved as float32, the type in which they are averaged. A tensor of one number keeps its shape
    ``()``.
    """
    trained = {tensor.name for tensor in (*layout.trunk, *layout.norm)} | {"head.weight", "head.bias"}
    saved = dict[str, Array]()
    for name, tensor in network.state_dict().items():
        if name in trained:
            saved[name] = np.asarray(tensor.detach().cpu().float().numpy(), order="C")
        elif name in network.frozen:
            saved[name] = np.asarray(tensor.detach().cpu().numpy(), order="C")
    return saved


def load_model(folder: Path) -> SplitNetwork:
    """Load the network that :func:`save_model` wrote to a folder, in evaluation mode.

    Raises:
        BadInput: If a file is missing or damaged, or the two files belong to different models.
    """
    saved = read_model_description(folder)
    content = _read_model_file(folder / TENSORS_FILE)
    where = str(folder / TENSORS_FILE)
    if (actual := hashlib.sha256(content).hexdigest()) != saved.safetensors_sha256:
        problem = f"has SHA-256 {actual}, but {DESCRIPTION_FILE} beside it names {saved.safetensors_sha256}."
        raise BadInput([Fault(where, problem, _COPY_BOTH_FILES_REMEDY)])
    try:
        tensors = dict[str, Array](safetensors.numpy.load(content))
    # Number types that numpy lacks raise one of the last three.
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise BadInput([Fault(where, f"is no safetensors file of float32 numbers: {error}.")]) from None
    network = _build_network_of_size(saved, sum(values.nbytes for values in tensors.values()), where)
    layout = make_model_layout(network)
    network_tensors = list_frozen_tensors(network)
    frozen = {name: tensors.pop(name) for name in network_tensors if name in tensors}
    try:
        wrong = [
            name
            for name in network_tensors
            if name not in frozen or frozen[name].shape != tuple(network_tensors[name].shape)
        ]
        if wrong:
            raise ValueError(f"{len(wrong)} frozen tensors are missing or of another shape, the first is {wrong[0]}")
        if network_tensors:
            expected = network.spec.frozen_sha256
            part = FrozenPart(np.concatenate([frozen[name].reshape(-1) for name in network_tensors]))
            if part.sha256 != expected:
                raise ValueError(f"its frozen part has SHA-256 {part.sha256}, the model names {expected}")
            part.write_to_network(network)
        state = join_tensors_into_state(tensors, layout, saved.class_names)
    except ValueError as error:
        problem = f"is not the {layout.architecture} of {DESCRIPTION_FILE}: {error}."
        is_given = is_local_plugin_name(layout.architecture.removeprefix(PLUGIN_PREFIX))
        remedy = "Give model= with the arguments that it was trained with." if is_given else _COPY_BOTH_FILES_REMEDY
        raise BadInput([Fault(where, problem, remedy)]) from None
    write_model_state(network, state.trunk, state.norm)
    head = make_dense_layer(torch.from_numpy(state.head.weight), torch.from_numpy(state.head.bias))
    return network.with_head(saved.class_names, head).eval()


def _build_network_of_size(saved: SavedModelDescription, size: int, where: str) -> SplitNetwork:
    """Build the network of a description with only one head row, because the file contains all rows.

    Args:
        saved: The description.
        size: Size of the tensors in the file, in bytes.
        where: Path of the file, for the fault.

    Raises:
        BadInput: If the network cannot be built, or takes far more memory than the tensors in the file.
    """
    # The owner of this machine installed a plug-in and trusts it, so its network has no limit.
    is_plugin = saved.model.architecture.startswith(PLUGIN_PREFIX)
    limit = MAX_MEMORY_FACTOR * size + EXTRA_MEMORY_BYTES
    try:
        with nullcontext() if is_plugin else limit_network_bytes(limit):
            return build_network(saved.model, saved.class_names[:1], seed=0)
    except NetworkTooLarge:
        problem = f"holds {format_bytes(size)}, and the network that {DESCRIPTION_FILE} names takes more than "
        problem += f"{format_bytes(limit)} of memory: it is another one."
        raise BadInput([Fault(where, problem, _COPY_BOTH_FILES_REMEDY)]) from None


def read_model_description(folder: Path) -> SavedModelDescription:
    """Read and validate the ``model.json`` of a folder.

    Raises:
        BadInput: If the file is missing or not valid in this release.
    """
    path = folder / DESCRIPTION_FILE
    try:
        return SavedModelDescription.model_validate_json(_read_model_file(path))
    except ValidationError as error:
        faults = list[Fault]()
        for fault in error.errors(include_url=False):
            where = ": ".join(filter(None, (str(path), ".".join(map(str, fault["loc"])))))
            faults.append(Fault(where, describe_validation_error(dict(fault)), _COPY_BOTH_FILES_REMEDY))
        raise BadInput(faults) from None


def _read_model_file(path: Path) -> bytes:
    try:
        with open_input_file(path) as file:
            return file.read()
    except OSError as error:
        raise BadInput([make_unreadable_model_fault(path, error)]) from None
