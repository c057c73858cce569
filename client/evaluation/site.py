"""``flwr-client evaluate``: score models on this hospital's own images. Nothing leaves, and nothing is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyclinic.client.site.settings import choose_training_device, load_site_data, read_site_settings
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.evaluation.evaluation import DataToScore, Evaluation, evaluate_models
from polyclinic.common.evaluation.foreign import ModelFile
from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.models import open_models
from polyclinic.common.evaluation.reading import make_data_to_score
from polyclinic.common.patients.opt_out import LeftOutPatients
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import DataSpec

TEST_PART = "The test part: patients on whom no run trains at this site."
ALL_IMAGES = (
    "All images of this site count, also those that its runs trained on. The figures of models of such runs are too "
    "good: without --all, the test part alone counts."
)


@dataclass(frozen=True)
class SiteEvaluation:
    """An evaluation at a site, with the images that were scored and the settings of their data."""

    evaluation: Evaluation
    data: DataToScore
    spec: DataSpec


def evaluate_at_site(
    folder: Path,
    files: Sequence[ModelFile],
    groupings: Sequence[Grouping],
    *,
    all_images: bool,
    tell: Callable[[str], None],
) -> SiteEvaluation:
    """Score models on a site's own images, without patients who opted out.

    Args:
        folder: The site's folder.
        all_images: True to score all images; False for the test part, as the site's earlier runs used it.
        tell: Prints lines for the hospital's staff.

    Raises:
        BadInput: If site.toml, the data or a model has faults; it lists all.
    """
    settings = read_site_settings(folder)
    models = open_models(files, choose_training_device(settings))
    about = {"": "All parts."} if all_images else {"": TEST_PART}

    def load(spec: DataSpec) -> ImageSet:
        images, left_out = load_images_to_score(settings, spec, all_images=all_images, tell=tell)
        if left_out.count:
            about["left out"] = f"{format_count_with_noun(left_out.count, 'patient')} who opted out left out."
        if warning := left_out.warn_about_unmatched():
            about["unmatched"] = warning
        return images

    data = make_data_to_score(
        settings.file.name,
        settings.file.data,
        settings.folder,
        load,
        about="",
        caution=ALL_IMAGES if all_images else "",
    )
    data = replace(data, about=" ".join(about.values()))
    return SiteEvaluation(evaluate_models(models, [data], groupings, tell), data, settings.file.data)


def load_images_to_score(
    settings: SiteSettings, spec: DataSpec, *, all_images: bool, tell: Callable[[str], None]
) -> tuple[ImageSet, LeftOutPatients]:
    """Return the images to score, read by the settings ``spec``, and the patients who were left out."""
    file = settings.file.model_copy(update={"data": spec})
    site, left_out, _ = load_site_data(replace(settings, file=file), tell).make_present_site()
    images = concatenate_image_sets([site.train, site.validation, site.test]) if all_images else site.test
    return images, left_out
