"""The check of a site's pixel settings against the plan; the coordinator makes the same comparison in a run."""

from collections.abc import Sequence

import numpy as np

from polyclinic.client.check.contract import DataComparison
from polyclinic.client.check.findings import CheckArea
from polyclinic.client.check.pictures import PictureFacts
from polyclinic.client.check.source import SiteImageSource
from polyclinic.client.check.training import PlannedTraining
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.data.base.dark_pictures import find_white_of_dark_pictures
from polyclinic.data.base.pixel_form import PixelForm, make_pixel_form
from polyclinic.data.base.spec import format_image_size


def check_site_pixels(area: CheckArea, planned: PlannedTraining, comparison: DataComparison) -> None:
    """Add a fault for each key of ``[data]`` that the coordinator would refuse, with the line to write instead.

    Settings that the plan leaves to the sites are compared only at the roll call.
    """
    form = comparison.form
    model = planned.plan.model
    area.facts["pixels"] = form.model_dump(mode="json")
    if planned.assumed:
        area.passed.append(f"pixels: {form.describe()}")
        return
    for fault in comparison.pixel_faults:
        area.add_fault(ClientExitCode.PIXELS, f"{fault.where}: {fault.problem}", fault.remedy)
    if not comparison.pixel_faults:
        area.passed.append(f"pixels: {form.describe()}, which {planned.origin} does not contradict")
    size = form.describe_size()
    network_size = format_image_size(model.image_size)
    resizes = model.patch_size is None
    if resizes and "image_size" not in comparison.terms.table and format_image_size(form.image_size) != network_size:
        problem = f"images are stored with {size}, and the network resizes them again, to "
        problem += f"{network_size}. If another hospital stores them in that size, this one is refused."
        area.add_note(problem, f"This line under [data] in {SITE_FILE} settles it: image_size = {network_size}")


def make_form_of_pictures(
    settings: SiteSettings, source: SiteImageSource, pictures: Sequence[PictureFacts]
) -> PixelForm:
    """Return the site's pixel settings, which dark or colour pictures can change."""
    if source.form is not None:
        drops_color = not source.form.color and any(facts.colored for facts in pictures)
        spec = settings.file.data
        brightest = [float(facts.pixels.max()) for facts in pictures if facts.pixels is not None]
        white = find_white_of_dark_pictures(brightest, spec) if brightest else 0
        return make_pixel_form(spec, source.form.shape, drops_color=drops_color, white_of_dark=white)
    first = source.read(0)
    assert isinstance(first, np.ndarray), "the images of a whole data set are in memory"
    return make_pixel_form(settings.file.data, first.shape)
