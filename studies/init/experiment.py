"""For ``flwr-sim init``: write a commented experiment file for an inspected label table.

Before the file is written, it passes all checks that a run makes before its first round, including decoding of all
pictures.
"""

from collections.abc import Callable
from pathlib import Path
from shlex import quote

from polyclinic.common.config import validate_experiment
from polyclinic.common.errors import raise_faults
from polyclinic.common.system.files import find_existing_output_faults, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun, join_as_english_list
from polyclinic.common.system.resources import exclude_imports_from_gc
from polyclinic.common.system.toml import parse_toml
from polyclinic.data.base.spec import NO_FINDING
from polyclinic.server.outbound_hosts import describe_experiment_hosts
from polyclinic.studies.init.hospitals import has_spelling_variants
from polyclinic.studies.init.report import describe_class_synonyms, describe_label_data, describe_pictures
from polyclinic.studies.init.table import InspectedDataset

MOST_SITES = 3
TEMPLATE = """# Made by flwr-sim init from {table}. Every key: docs/experiments.md.
[run]
method = "surgical"             # each class's row of the head is averaged over the sites that annotate it
# name = {name}   # in tables and pages; the method's where left out
rounds = 20

[model]
architecture = "tiny_cnn"       # small and fast; "timm:resnet18" for instance for larger images
channels = {channels}
image_size = {image_size}                 # pixels that the network sees; these pictures have {pixels}

[training]
epochs = 1                      # of each site in each round
batch_size = 32
lr = 1e-3

[augmentation]
rotation = 0.03                 # of a full turn
horizontal_flip = false         # true where left and right mean nothing

[data]
kind = "folder"
images = {images}
labels = {labels}
image_column = {image_column}
{columns}
image_size = {image_size}
color = {color}
{synonyms}
{partition}"""
_SIMULATED = """# Simulated hospitals: patients are dealt over them, and the classes that each of them annotates.
[partition]
kind = "class_subsets"
sites = {sites}
shared = {shared}                      # classes that all of them annotate
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


def check_and_write_experiment(
    data: InspectedDataset, out: Path, tell: Callable[[str], object] = lambda line: None
) -> list[str]:
    """Check an experiment as a run does, write its file, and return lines on contents and limits of the data.

    Progress lines are printed by ``tell`` while images are decoded.

    Raises:
        BadInput: If the file exists already, or a run would refuse the experiment.
    """
    raise_faults(find_existing_output_faults(out))
    with exclude_imports_from_gc():  # torch takes seconds, and most faults are found before
        from polyclinic.common.simulation import clear_simulated_data_cache
        from polyclinic.server.simulation.simulate import check_simulation_experiment

    tree = parse_toml(_format_experiment_file(data, out.resolve(), confirmed=True))
    clear_simulated_data_cache()
    file = validate_experiment(tree, out.resolve(), name=out.name)
    _, checked = check_simulation_experiment(file, tell)
    write_atomically(out, _format_experiment_file(data, out.resolve()).encode())
    skipped = [skip for part in checked.splits.parts for skip in part.skipped]
    lines = [f"{out}: an experiment on {format_count_with_noun(len(data.checked.files) - len(skipped), 'image')}."]
    notes = [note for note in checked.splits.train.notes if note != data.checked.other_findings_note]  # not decided yet
    lines += [*describe_pictures(data, skipped), *(f"    {note}" for note in notes)]
    hosts = describe_experiment_hosts(file)
    return [*lines, *describe_label_data(data), *describe_class_synonyms(data, out), *hosts]


def describe_next_command(data: InspectedDataset, out: Path) -> str:
    """Return a line for the user with the next command, and the decisions to make before it."""
    first = (
        f"first decide on {join_as_english_list(data.undecided_settings)} in {out}, then: "
        if data.undecided_settings
        else ""
    )
    return f"Next: {first}flwr-sim run {quote(str(out))} --out {quote(f'runs/{out.stem}')} --backend inline"


def _format_experiment_file(data: InspectedDataset, out: Path, *, confirmed: bool = False) -> str:
    """Return the text of the experiment file.

    The file leaves some decisions to the user, as lines that begin with ``#``.

    Args:
        data: The data set, its images and its table.
        out: Path of the file; paths in the text are relative to its folder where possible.
        confirmed: True to take these decisions for the user, so that the text can be checked: all synonyms are accepted
            if some differ only in spelling, doubtful names are listed in ``other_findings``, and names that mean an
            image was not assessed in ``not_assessed``.
    """
    roles, folder, columns = data.roles, out.parent, _format_column_lines(data, confirmed=confirmed)
    pixels = "sizes of their own"
    if data.sizes:
        low, high = (f"{height} x {width}" for height, width in (min(data.sizes), max(data.sizes)))
        pixels = low if low == high else f"{low} to {high}"
    count, hospitals = len(roles.classes) - len(data.synonyms), data.hospitals
    sites = min(MOST_SITES, count)
    if hospitals is None:
        partition = _SIMULATED.format(sites=sites, shared=int(count > sites))
    else:
        evidence = "those of which not all of its cells are blank"
        evidence = evidence if hospitals.by_label else "those that its findings name; all where they name none"
        source, lists = format_as_json_text(roles.source), hospitals.format_partition_lists()
        partition = _HOSPITALS.format(source=source, evidence=evidence, lists=lists)
    mark = "" if confirmed and has_spelling_variants(data.synonyms) else "# "
    synonyms = [
        f"{mark}synonyms.{format_as_json_text(own)} = {format_as_json_text(name)}"
        for own, name in data.synonyms.items()
    ]
    if synonyms:
        hint = "# Names that may mean one class. Remove the # of a line to make them one: left name = right name."
        synonyms = [hint, *synonyms, ""]
    return TEMPLATE.format(
        table=data.table.name,
        name=format_as_json_text(out.stem),
        image_size=data.image_size,
        pixels=pixels,
        channels=3 if data.color else 1,
        images=format_as_json_text(_make_relative_path(data.images, folder)),
        labels=format_as_json_text(_make_relative_path(data.table, folder)),
        image_column=format_as_json_text(roles.image),
        columns="\n".join(columns),
        color=str(data.color).lower(),
        synonyms="\n".join(synonyms),
        partition=partition,
    )


def _format_column_lines(data: InspectedDataset, *, confirmed: bool) -> list[str]:
    """Return the lines of ``[data]`` that name columns and say how their cells are read."""
    roles = data.roles
    if roles.patient:
        columns = [f"patient_column = {format_as_json_text(roles.patient)}"]
    elif data.patient_source_and_count:
        columns = ["# patient_column = ...          # left out: PatientID of the DICOM files is taken"]
    else:
        columns = ["# patient_column = ...          # UNKNOWN: without it one patient may stand in training and test"]
    columns += _format_label_lines(data, confirmed=confirmed)
    if data.spec.similar_patients == "join":
        columns.append('similar_patients = "join"       # patients whose names are alike count as one')
    if roles.source:
        columns.append(f"source_column = {format_as_json_text(roles.source)}")
    if roles.split:
        columns.append(f"split_column = {format_as_json_text(roles.split)}")
    for name in () if roles.split else roles.possible_splits:
        columns.append(f"# split_column = {format_as_json_text(name)}   # once its cells are train, val or test")
    if data.depth is not None:
        columns.append(
            f"bit_depth = {data.depth}                  # of 16-bit PNG files; a guess, ask who exported them"
        )
    if data.display_problems:
        columns.append(
            "# window = [40, 400]            # centre and width of grey values, the same for all files; here CT"
        )
    if data.present < data.rows:
        columns.append('missing_files = "ignore"        # rows without a picture are left out')
    return columns


def _format_label_lines(data: InspectedDataset, *, confirmed: bool) -> list[str]:
    """Return the lines of ``[data]`` on the label columns, or on the column of findings and the names in it."""
    roles, columns = data.roles, list[str]()
    if roles.label_columns:
        columns.append(f"label_columns = {format_as_json_text(list(roles.label_columns))}")
        columns.append('uncertain = "unknown"           # what -1 means')
        columns.append('# blank = "negative"            # a blank cell means: absent; without this line: nobody looked')
    else:
        columns.append(f"finding_column = {format_as_json_text(roles.finding)}")
        columns.append(f"separator = {format_as_json_text(roles.separator)}")
        names = format_as_json_text(list(roles.classes))
        columns.append(f"classes = {names}   # move what is no finding to the next lines")
        mark = "" if roles.no_finding else "# "
        names = format_as_json_text([*NO_FINDING, *roles.no_finding])
        columns.append(f"{mark}no_finding = {names}   # such an image shows no class")
        mark = "" if roles.doubtful and confirmed else "# "
        columns.append(f"{mark}other_findings = {format_as_json_text(list(roles.doubtful))}   # count as no class")
        if roles.not_assessed:
            mark, names = "" if confirmed else "# ", format_as_json_text(list(roles.not_assessed))
            columns.append(f"{mark}not_assessed = {names}   # the labels of such an image are unknown")
        if data.blank_finding_count:
            columns.append(
                '# blank = "negative"            # a blank cell means: no finding; without this line: unknown'
            )
    return columns


def _make_relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to ``folder`` if it lies below the folder, else an absolute path."""
    absolute = path.resolve()
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else absolute.as_posix()
