"""For ``flwr-sim init``: write a commented experiment file for an inspected label table.

Before it is written, the file must pass all checks of a run before its first round, including decoding all pictures.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np

from polyclinic.common.config import validate_experiment
from polyclinic.common.errors import raise_faults
from polyclinic.common.system.files import find_existing_output_faults, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun, join_as_english_list
from polyclinic.common.system.resources import exclude_imports_from_gc
from polyclinic.common.system.toml import parse_toml
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.base.spec import NO_FINDING, VolumeSize, format_image_size
from polyclinic.data.base.splits import assign_patients_by_name, divide_splits_again, name_unknown_patients
from polyclinic.data.images.volume_notes import describe_sides_of_volumes, find_median_spacing
from polyclinic.data.partition.partition import partition_dataset
from polyclinic.server.outbound_hosts import describe_experiment_hosts
from polyclinic.studies.init.hospitals import choose_simulated_hospitals
from polyclinic.studies.init.masks import MaskClasses
from polyclinic.studies.init.report import (
    describe_drawn_parts,
    describe_label_data,
    describe_pictures,
    describe_spelling_synonyms,
    read_labels_of_masks,
)
from polyclinic.studies.init.roles import list_no_finding_names
from polyclinic.studies.init.table import InspectedDataset

TEMPLATE = """# Made by flwr-sim init from {table}. Every key: docs/experiments.md.
[run]
method = "surgical"             # {why}
# {alternative}
# name = {name}   # in tables and pages; if left out, the method's, or in comparisons this file's
rounds = {rounds}                     # a first look: {rounds_reason}

[model]
{architecture}
channels = {channels}
image_size = {image_size}                 # {unit} that the network sees; these {images} have {pixels}

[training]
epochs = 1                      # of each site in each round
batch_size = {batch_size}
lr = {lr}

[augmentation]
rotation = 0.03                 # of a full turn{around}
horizontal_flip = false         # true where left and right mean nothing

[data]
{data}
image_size = {image_size}
color = {color}
{synonyms}
{partition}"""
_WORDS_OF_PICTURES = {
    "rounds": 20,
    "rounds_reason": "more rounds were ahead in each block that was run with more",
    "architecture": 'architecture = "tiny_cnn"       # small and fast; "timm:resnet18" for instance for larger images',
    "unit": "pixels",
    "images": "pictures",
    "batch_size": 32,
    "lr": "1e-3",
    "around": "",
}
_WORDS_OF_VOLUMES = {
    "rounds": 20,
    "rounds_reason": "more rounds were ahead in each block that was run with more",
    "architecture": 'architecture = "tiny_cnn_3d"    # small and fast; "monai:DenseNet121" for instance is larger',
    "unit": "voxels (depth, height, width)",
    "images": "volumes",
    "batch_size": 4,
    "lr": "1e-3",
    "around": " around the axis from feet to head",
}
_NETWORK_OF_MASKS = """task = "{task}"   # {reason}
architecture = "tiny_unet"       # small and fast; "monai:DynUNet" is larger"""
"""What differs in the file of an experiment."""
METHOD_REASON = "ahead of methods that pass one model on, in equal time, and its updates can be masked"
"""Why ``init`` writes ``surgical``: docs/methods.md, "Which method do I take?"."""
METHOD_REASON_OF_MASKS = "an organ that one hospital outlines keeps that hospital's row of the network's last layer"
OTHER_METHOD_OF_MASKS = 'To compare with distillation of what is not outlined: method = "condistfl".'
"""Why ``init`` writes ``surgical`` for masks: docs/segmentation.md, "Does it help?"."""
_SIMULATED = """# Simulated hospitals: patients are divided over them, and so are the classes that they annotate.
# A class that is not shared is annotated by one hospital alone; all others hide its labels, as if nobody had looked.
# So there are at most as many hospitals as classes, unless a class is shared.
[partition]
kind = "class_subsets"
sites = {sites}
shared = {shared}                      # number of classes that all of them annotate, or a list of their names
"""
_HOSPITALS = """# Each hospital of column {source} is a site.
[partition]
kind = "class_lists"
images = "source"
test_labels = "listed"          # or "all", where every class was looked for in all test images

# The classes that each of them annotates, by its own names: {evidence}.
# In training and in test a class that is not in a hospital's list is unknown in its images.
[partition.lists]
{lists}
"""


def describe_other_method(*, has_shared_class: bool) -> str:
    """Return a sentence on the method to choose if the number of rounds is limited, and time is not.

    Args:
        has_shared_class: Whether several hospitals annotate a class.
    """
    method = '"fedseq" with missing = "masked" in [method]' if has_shared_class else '"polyclinic"'
    return f"If only few rounds are possible, and hospitals can train one after another: method = {method}."


def describe_method_of_masks() -> list[str]:
    """Return lines for the user on the method for masks, and on one to compare it with."""
    other = f"    {OTHER_METHOD_OF_MASKS} Figures: docs/segmentation.md."
    return [f"method: surgical, {METHOD_REASON_OF_MASKS}.", other]


def describe_method(*, has_shared_class: bool) -> list[str]:
    """Return lines for the user on the experiment's method and its reason."""
    other = describe_other_method(has_shared_class=has_shared_class)
    return [f"method: surgical, {METHOD_REASON}.", f"    {other} Figures: docs/methods.md."]


def check_and_write_experiment(
    data: InspectedDataset, out: Path, tell: Callable[[str], object] = lambda line: None
) -> list[str]:
    """Check an experiment as a run does, write its file, and return lines on the data's content and limits.

    Args:
        tell: Prints progress lines while images are decoded.

    Raises:
        BadInput: If the file exists already, or a run would refuse the experiment.
    """
    splits, hosts = check_experiment_text(_format_experiment_file(data, out.resolve(), confirmed=True), out, tell)
    if data.masks is not None:  # only now are the masks read, by which classes are balanced and hospitals annotate
        data = read_labels_of_masks(data, splits)
        splits = _divide_anew(data, splits, out.resolve())
    write_atomically(out, _format_experiment_file(data, out.resolve()).encode())
    skipped = [skip for part in splits.parts for skip in part.skipped]
    lines = [f"{out}: an experiment on {format_count_with_noun(len(data.checked.files) - len(skipped), 'image')}."]
    lines += [*describe_pictures(data, splits), *(f"    {note}" for note in splits.train.notes)]
    # Missing pictures were listed above, by name.
    omissions = [sentence for sentence in splits.train.omissions if sentence != data.checked.missing_sentence]
    lines += [f"    {sentence}" for sentence in omissions]
    lines += describe_label_data(data)
    if data.masks is None:
        lines += describe_method(has_shared_class=has_shared_class(data))
    else:
        lines.append(f"task: {data.masks.classes.task}, because {data.masks.classes.describe_task()}.")
        lines += describe_method_of_masks()
    if not data.roles.split:
        lines += describe_drawn_parts(splits)
    return [*lines, *describe_spelling_synonyms(data, out), *hosts]


def _divide_anew(data: InspectedDataset, splits: DatasetSplits, out: Path) -> DatasetSplits:
    """Return the images with the parts and hospitals of the experiment file that ``init`` is about to write.

    No picture is decoded again.

    Raises:
        BadInput: If a run would refuse these hospitals.
    """
    text = _format_experiment_file(data, out, confirmed=True)
    experiment = validate_experiment(parse_toml(text), out, name=out.name).experiment
    assert experiment.partition is not None, "init writes one"
    splits = DatasetSplits(*(replace(part, omissions=data.checked.omissions) for part in splits.parts))
    if not data.roles.split:
        patients = name_unknown_patients(data.checked.patients, lambda: data.checked.files.names.astype(np.str_))
        assert data.checked.lines is not None, "a table has lines"
        parts = dict(zip(data.checked.lines.tolist(), assign_patients_by_name(patients, data.split_seed), strict=True))
        of_images = [np.array([parts[line] for line in _list_lines(part)], np.str_) for part in splits.parts]
        splits = divide_splits_again(splits, of_images)
    return partition_dataset(splits, experiment.partition, experiment.run.seed).splits


def _list_lines(images: ImageSet) -> list[int]:
    assert images.lines is not None, "a table has lines"
    lines: list[int] = images.lines.tolist()
    return lines


def check_experiment_text(text: str, out: Path, tell: Callable[[str], object]) -> tuple[DatasetSplits, list[str]]:
    """Check the text of an experiment as a run does, and decode all pictures.

    Returns:
        The images, and lines on the hosts to which a run would connect.

    Raises:
        BadInput: If the file exists already, or a run would refuse the experiment.
    """
    raise_faults(find_existing_output_faults(out))
    with exclude_imports_from_gc():  # torch takes seconds, and most faults are found before
        from polyclinic.common.simulation import clear_simulated_data_cache
        from polyclinic.server.simulation.simulate import check_simulation_experiment

    clear_simulated_data_cache()
    file = validate_experiment(parse_toml(text), out.resolve(), name=out.name)
    _, checked = check_simulation_experiment(file, tell)
    return checked.splits, list(describe_experiment_hosts(file))


def has_shared_class(data: InspectedDataset) -> bool:
    """Return True if several hospitals, of the table or simulated, annotate a class."""
    if data.hospitals is None:
        return choose_simulated_hospitals(data.class_count)[1] > 0
    return bool((data.hospitals.annotated.sum(axis=0) > 1).any())


def describe_next_command(undecided_settings: Sequence[str], out: Path) -> str:
    """Return the next command for the user, and the decisions to make before it."""
    first = f"first decide on {join_as_english_list(undecided_settings)} in {out}, then: " if undecided_settings else ""
    run = f"Next: {first}flwr-sim run {quote(str(out))} --out {quote(f'runs/{out.stem}')} --backend inline"
    compare = (
        f"flwr-sim compare {quote(str(out))} OTHER.toml --backend inline --out {quote(f'runs/{out.stem}_methods')}"
    )
    how = 'copy the file to OTHER.toml, write another method there, such as method = "partial_loss", and:'
    return f"{run}\nTo compare methods, {how}\n{compare}"


def format_experiment_text(
    *,
    table: Path,
    out: Path,
    data: str,
    partition: str,
    image_size: int | VolumeSize,
    color: bool,
    sizes: Sequence[tuple[int, ...]],
    has_shared_class: bool,
    synonyms: Sequence[str] = (),
    masks: MaskClasses | None = None,
) -> str:
    """Return the text of an experiment file.

    Args:
        table: The user's table.
        out: Path of the file.
        data: The lines of ``[data]`` but for size and colour.
        partition: The lines of ``[partition]``.
        image_size: Side length of the images in pixels; depth, height and width of volumes in voxels.
        color: Whether the images have colours.
        sizes: Height and width of some pictures; depth, height and width of some volumes.
        has_shared_class: True if several hospitals annotate a class.
        synonyms: Lines on synonyms.
        masks: The classes of masks; None for labels.
    """
    pixels = "sizes of their own"
    if sizes:
        low, high = (" x ".join(map(str, size)) for size in (min(sizes), max(sizes)))
        pixels = low if low == high else f"{low} to {high}"
        if not isinstance(image_size, int):
            pixels = describe_sides_of_volumes(sizes).replace("×", "x")
    words: dict[str, object] = {**(_WORDS_OF_PICTURES if isinstance(image_size, int) else _WORDS_OF_VOLUMES)}
    if masks is not None:
        network = _NETWORK_OF_MASKS.format(task=masks.task, reason=masks.describe_task())
        words |= {"architecture": network, "batch_size": 8 if isinstance(image_size, int) else 2, "lr": "3e-3"}
        words |= {"rounds": 40, "rounds_reason": "an organ that one hospital outlines is learned late"}
    return TEMPLATE.format(
        table=table.name,
        why=METHOD_REASON if masks is None else METHOD_REASON_OF_MASKS,
        alternative=OTHER_METHOD_OF_MASKS
        if masks is not None
        else describe_other_method(has_shared_class=has_shared_class),
        name=format_as_json_text(out.stem),
        **words,
        image_size=format_image_size(image_size),
        pixels=pixels,
        channels=3 if color else 1,
        data=data,
        color=str(color).lower(),
        synonyms="\n".join(synonyms),
        partition=partition,
    )


def format_simulated_partition(class_count: int) -> str:
    """Return the lines of ``[partition]`` for simulated hospitals."""
    sites, shared = choose_simulated_hospitals(class_count)
    return _SIMULATED.format(sites=sites, shared=shared)


def make_relative_path(path: Path, folder: Path) -> str:
    """Return the path relative to ``folder`` if it is below it, else the absolute path."""
    absolute = path.resolve()
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else absolute.as_posix()


def _format_experiment_file(data: InspectedDataset, out: Path, *, confirmed: bool = False) -> str:
    """Return the text of the experiment file.

    Args:
        data: The data set, its images and its table.
        out: Path of the file; paths in the text are relative to its folder where possible.
        confirmed: Whether the synonyms are accepted, for a check; the file proposes them as comments.
    """
    hospitals = data.hospitals
    if hospitals is None:
        partition = format_simulated_partition(data.class_count)
    else:
        evidence = hospitals.evidence
        source, lists = format_as_json_text(data.roles.source), hospitals.format_partition_lists()
        partition = _HOSPITALS.format(source=source, evidence=evidence, lists=lists)
    mark = "" if confirmed else "# "
    synonyms = [
        f"{mark}synonyms.{format_as_json_text(own)} = {format_as_json_text(name)}"
        for own, name in data.synonyms.items()
    ]
    if synonyms:
        hint = "# Names that differ only in spelling. Remove the # of a line to make them one: left name = right name."
        synonyms = [hint, *synonyms, ""]
    return format_experiment_text(
        table=data.own_table,
        out=out,
        data="\n".join(_format_data_lines(data, out.parent)),
        partition=partition,
        image_size=data.image_size,
        color=data.color,
        sizes=data.sizes,
        has_shared_class=has_shared_class(data),
        synonyms=synonyms,
        masks=None if data.masks is None else data.masks.classes,
    )


def _format_data_lines(data: InspectedDataset, folder: Path) -> list[str]:
    """Return the lines of ``[data]`` on files, columns and the reading of cells."""
    roles = data.roles
    lines = [
        'kind = "folder"',
        f"images = {format_as_json_text(make_relative_path(data.images, folder))}",
        f"labels = {format_as_json_text(make_relative_path(data.table, folder))}",
        f"image_column = {format_as_json_text(roles.image)}",
    ]
    if roles.patient:
        lines.append(f"patient_column = {format_as_json_text(roles.patient)}")
    elif data.patient_source_and_count:
        lines.append("# patient_column = ...          # left out: PatientID of the DICOM files is taken")
    else:
        lines.append("# patient_column = ...          # left out: each picture counts as a patient of its own")
    lines += _format_label_lines(data) if data.masks is None else _format_mask_lines(data, folder)
    if data.spec.similar_patients == "join":
        lines.append('similar_patients = "join"       # patients whose names are alike count as one')
    if roles.source:
        lines.append(f"source_column = {format_as_json_text(roles.source)}")
    if roles.split:
        lines.append(f"split_column = {format_as_json_text(roles.split)}")
    else:
        lines.append(f"split_seed = {data.split_seed}                # 70/10/20 by patient, balanced over the classes")
    for name in () if roles.split else roles.unread_splits:
        lines.append(f"# split_column = {format_as_json_text(name)}   # once its cells are train, val or test")
    if data.depth is not None:
        lines.append(f"bit_depth = {data.depth}                  # of 16-bit PNG files; a guess, ask who exported them")
    if data.volumes:
        median = ", ".join(f"{step:g}" for step in find_median_spacing(data.volumes))
        if data.spec.spacing is None:
            lines.append(f"# spacing = [{median}]          # mm: resample to these voxels (the median), then pad")
        else:
            steps = ", ".join(f"{step:g}" for step in data.spec.spacing)
            lines.append(f"# The files' own voxels are unlike in size, with the median [{median}] mm.")
            lines.append(f"spacing = [{steps}]           # mm: all volumes are resampled to these voxels, then padded")
        lines.append("# window = [40, 400]            # centre and width of grey values; here CT. MRI needs none")
    elif data.display_problems:
        lines.append(
            "# window = [40, 400]            # centre and width of grey values, the same for all files; here CT"
        )
    if data.spec.missing_files == "ignore":
        lines.append('missing_files = "ignore"        # lines without a picture are left out, as you said')
    return lines


def _format_mask_lines(data: InspectedDataset, folder: Path) -> list[str]:
    """Return the lines of ``[data]`` on masks: their folder and classes."""
    lines, spec = list[str](), data.spec
    if spec.masks is not None:
        lines.append(f"masks = {format_as_json_text(make_relative_path(Path(spec.masks), folder))}")
    if spec.mask_columns:
        lines.append("# A class whose cell is blank is not annotated in that image, and never background.")
        table = ", ".join(
            f"{format_as_json_text(name)} = {format_as_json_text(column)}" for name, column in spec.mask_columns.items()
        )
        return [*lines, f"mask_columns = {{ {table} }}"]
    lines.append(f"mask_column = {format_as_json_text(spec.mask_column)}   # a blank cell: nobody outlined the image")
    table = ", ".join(f"{format_as_json_text(name)} = {value}" for name, value in spec.mask_values.items())
    return [*lines, f"mask_values = {{ {table} }}"]


def _format_label_lines(data: InspectedDataset) -> list[str]:
    """Return the lines of ``[data]`` on the label columns, or on the finding column and the names in it."""
    roles, names = data.roles, data.names
    if names is None:
        lines = [f"label_columns = {format_as_json_text(list(roles.label_columns))}"]
        for key, label in (("present", "1"), ("absent", "0"), ("not_assessed", "an unknown label")):
            if words := getattr(roles.words, key):
                lines.append(f"{key} = {format_as_json_text(list(words))}   # these words count as {label}")
        lines.append(f"uncertain = {format_as_json_text(data.spec.uncertain)}           # what -1 means")
        if data.spec.blank == "negative":
            lines.append('blank = "negative"              # a blank cell means: absent')
        else:
            lines.append(
                '# blank = "negative"            # a blank cell means: absent; without this line: nobody looked'
            )
        return lines
    lines = [f"finding_column = {format_as_json_text(roles.finding)}"]
    lines.append(f"separator = {format_as_json_text(names.separator)}")
    lines.append(f"classes = {format_as_json_text(list(names.classes))}   # move what is no finding to the next lines")
    own = list_no_finding_names(names)
    mark = "# " if own == NO_FINDING else ""
    no_finding = format_as_json_text(list(own))
    lines.append(f"{mark}no_finding = {no_finding}   # such an image shows no class")
    mark = "" if names.other_findings else "# "
    others = format_as_json_text(list(names.other_findings))
    lines.append(f"{mark}other_findings = {others}   # such names count as no class")
    if names.not_assessed:
        words = format_as_json_text(list(names.not_assessed))
        lines.append(f"not_assessed = {words}   # the labels of such an image are unknown")
    lines.append('# blank = "negative"            # a blank cell means: no finding; without this line: unknown')
    return lines
