"""``flwr-sim evaluate`` with several models, with models of other programs, or with several hospitals' data sets."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from polyclinic.common.errors import BadInput
from polyclinic.common.evaluation.evaluation import DataToScore, Evaluation, evaluate_models, split_by_source
from polyclinic.common.evaluation.foreign import ModelFile
from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.models import open_models
from polyclinic.common.evaluation.reading import make_data_to_score
from polyclinic.common.system.files import is_file
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.common.system.toml import read_toml
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.spec import DataSpec
from polyclinic.data.images.store import open_user_image_store
from polyclinic.data.load import load_dataset
from polyclinic.server.export.evaluation import select_hospital_images
from polyclinic.server.export.preflight import LabelledDataset, is_site_toml, read_labelled_dataset
from polyclinic.server.runs.reader import read_run

ALL_PARTS_NOTE = "All parts."
ALL_IMAGES_WARNING = (
    "All images count, also those of the training parts. Where a model was trained on them, its figures are too good: "
    "without --all, the test parts alone count."
)


def evaluate_several_models(
    models: Sequence[ModelFile],
    files: Sequence[Path],
    groupings: Sequence[Grouping],
    *,
    all_parts: bool,
) -> Evaluation:
    """Score models on the test parts of data sets.

    Args:
        files: Experiments, and site.toml files of hospitals.
        all_parts: True to score all images of each data set.

    Raises:
        BadInput: If a model or a file cannot be read, or a model shares no class with any of the data.
    """
    loaded = open_models(models)
    names = [str(read_toml(file)["name"]) if is_site_toml(file) else file.stem for file in files]
    if len(set(names)) < len(names):
        names = list(map(str, files))
    data = list[DataToScore]()
    for file, name in zip(files, names, strict=True):
        dataset = _open_data(file, name, models, all_parts=all_parts)
        data += split_by_source(dataset) if len(files) == 1 else [dataset]
    return evaluate_models(loaded, data, groupings)


def _open_data(file: Path, name: str, models: Sequence[ModelFile], *, all_parts: bool) -> DataToScore:
    """Return the images of a file to score, with a note on them and a warning if they may be training images."""
    described = read_labelled_dataset(file)

    def load(spec: DataSpec) -> ImageSet:
        splits = load_dataset(spec, described.base, open_user_image_store())
        return select_hospital_images(splits, replace(described, spec=spec), all_parts=all_parts)

    if all_parts:
        return make_data_to_score(
            name, described.spec, described.base, load, about=ALL_PARTS_NOTE, caution=ALL_IMAGES_WARNING
        )
    caution = "" if described.state else _warn_about_other_data(file, described, models)
    about = f"The test part of {file.name}'s data."
    return make_data_to_score(name, described.spec, described.base, load, about=about, caution=caution)


def _warn_about_other_data(file: Path, described: LabelledDataset, models: Sequence[ModelFile]) -> str:
    """Return a warning about runs that were trained on other data than a file describes; empty if there are none.

    The training parts of such runs may contain images of the file's test part.
    """
    others = [str(model.path) for model in models if model.is_run and _read_run_data(model.path) != described.spec]
    if not others:
        return ""
    of = "of" if len(others) == 1 else "of each of"
    return (
        f"{file.name} is not the experiment {of} {join_as_english_list(others)}: its test part may contain images that "
        "were trained on, and the figures are then too good."
    )


def _read_run_data(folder: Path) -> DataSpec | None:
    """Return the data spec of a run; None if the folder has no readable summary with one."""
    if not is_file(folder / "summary.json"):
        return None
    try:
        data: DataSpec = TypeAdapter(DataSpec).validate_python(read_run(folder).summary.experiment.get("data"))
    except (BadInput, ValidationError):
        return None
    return data
