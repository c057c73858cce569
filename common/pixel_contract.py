"""The agreement of a run's sites on pixels: equal images must become equal numbers at every hospital.

If one hospital reads its images in colour and another in grey, or with another window, the network learns these
settings instead of the findings. So each site states its settings at the roll call
(:class:`polyclinic.data.base.pixel_form.PixelForm`). A site that differs is refused; the message has the line of
configuration that fixes it. A difference is allowed only where it changes no pixel: grey images that a network repeats
to three channels, or a key without a meaning for a site's kind of data.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import Fault
from polyclinic.data.base.pixel_form import PIXEL_KEYS, RENDERING_KEYS, SITE_SPECIFIC_KEY, PixelForm, format_setting
from polyclinic.data.base.spec import VolumeSize, describe_sides, format_image_size

Forms = Sequence[tuple[str, PixelForm]]
"""Pairs of site name and pixel form, in the order in which the sites were admitted."""


@dataclass(frozen=True)
class PixelTerms:
    """The pixel settings that a run fixes before any site answers the roll call.

    Attributes:
        channels, image_size: Input of the network.
        table: The table ``[pixels]`` of the experiment.
        begun: The agreed pixel form of a run that has begun; None before round 1.
        model_decides_color: True if a network of three channels requires images in colour, unless the table says
            otherwise. False in a simulation, whose sites share one data set and cannot differ.
        patch_sides: Size of the network's patches: height and width, or depth, height and width; None for whole images.
    """

    channels: int
    image_size: int | VolumeSize
    table: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    begun: PixelForm | None = None
    model_decides_color: bool = True
    patch_sides: tuple[int, ...] | None = None

    @classmethod
    def from_plan(cls, plan: HospitalPlan) -> "PixelTerms":
        """Return the pixel settings of a plan, before round 1."""
        model = plan.model
        patch_sides = None if model.patch_size is None else model.sides
        table = plan.pixels or {}
        return cls(channels=model.channels, image_size=model.image_size, table=table, patch_sides=patch_sides)

    def find_stated_value(self, key: str) -> "_RunValue | None":
        """Return the value that the run fixes for a key; None if the run leaves the key to the sites."""
        if key in self.table:
            value = self.table[key]
            return _RunValue(value, f"the experiment says {format_setting(key, value)} under [pixels]")
        if self.begun is not None and self.begun.has_setting(key):
            value = self.begun.read_setting(key)
            return _RunValue(value, f"the run began with {format_setting(key, value)}")
        if key == "color" and self.channels == 3 and self.model_decides_color:
            return _RunValue(True, "the network takes colour (model.channels = 3)", is_of_model=True)
        return None


@dataclass(frozen=True)
class _RunValue:
    """The value that a run requires for a key.

    Attributes:
        value: The value.
        reason: Clause for the message to a site with another value: why the run requires this value.
        is_of_model: True if the value follows from the network alone.
    """

    value: Any
    reason: str
    is_of_model: bool = False


def find_pixel_faults(forms: Forms, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each key in which a site reads its images in another way than the run requires.

    The run requires the experiment's value. Without one, it requires the network's value if image sizes differ.
    Otherwise it requires the value of most sites, and on a tie that of the site that was admitted first. A site that
    differs in one key has no vote on later keys.
    """
    faults = _find_dimension_faults(forms, terms) or _find_small_image_faults(forms, terms)
    forms = [(site, form) for site, form in forms if site not in {fault.site for fault in faults}]
    for key, run in _choose_run_values(forms, terms).items():
        faults += [_make_pixel_fault(site, form, key, run) for site, form in forms if not _agrees(form, key, run.value)]
    faults += _find_nearly_black_sites(forms, _select_without_fault(forms, faults), terms)
    rules = [(site, form.rules) for site, form in _select_without_fault(forms, faults)]
    run_rules = _choose_by_vote(rules).value if rules else 0
    if terms.begun:
        run_rules = terms.begun.rules
    for site, form in forms:
        if form.rules != run_rules:
            problem = f"its release turns files into pixels by rules {form.rules}, the run by rules {run_rules}."
            faults.append(Fault(f"site {site}", problem, "Install the coordinator's release there.", site))
    return faults


def _find_dimension_faults(forms: Forms, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each site with pictures if the network takes volumes, and for each with volumes if it does
    not.
    """
    faults = list[Fault]()
    for site, form in forms:
        if (form.depth is not None) == isinstance(terms.image_size, tuple):
            continue
        theirs, needed = ("pictures", "volumes") if form.depth is None else ("volumes", "pictures")
        size = format_image_size(terms.image_size)
        problem = f"its images are {theirs} of {form.describe_size()}, and the network takes {needed}, {size}."
        remedy = f"This line under [data] in site.toml of {site} reads {needed}:\n    image_size = {size}"
        faults.append(Fault(f"site.toml of {site}: data.image_size", problem, remedy, site))
    return faults


def _find_small_image_faults(forms: Forms, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each site whose images are smaller than the network's patches along an axis."""
    faults = list[Fault]()
    if terms.patch_sides is None:
        return faults
    for site, form in forms:
        sides = form.volume_size or (form.height, form.width)
        if all(side >= least for side, least in zip(sides, terms.patch_sides, strict=True)):
            continue
        size = format_image_size(terms.image_size)
        problem = f"its images are {form.describe_size()}, smaller than the run's patches, "
        problem += f"{describe_sides(terms.patch_sides)}."
        remedy = f"This line under [data] in site.toml of {site} settles it:\n    image_size = {size}"
        faults.append(Fault(f"site.toml of {site}: data.image_size", problem, remedy, site))
    return faults


def _select_without_fault(forms: Forms, faults: Sequence[Fault]) -> Forms:
    """Return the sites without a fault, which vote on the next key; all sites if each has a fault."""
    faulty = {fault.site for fault in faults}
    return [(site, form) for site, form in forms if site not in faulty] or forms


def find_pixel_faults_of_table(table: str, form: PixelForm, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each key in which the coordinator reads its images in another way than the sites.

    Args:
        table: Table of the experiment, such as ``external_test``.
        form: Pixel form of the coordinator's images.
        terms: The pixel settings that the run fixes.
    """
    faults = find_pixel_faults([(table, form)], terms)
    return [replace(_move_to_experiment(fault, table, table), site="") for fault in faults]


def find_pixel_faults_of_simulation(forms: Forms, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each simulated site and key in which ``[data]`` differs from ``[pixels]`` of the experiment.

    Simulated sites have no ``site.toml``, so the remedy is a line of the experiment.
    """
    return [_move_to_experiment(fault, fault.site, "data") for fault in find_pixel_faults(forms, terms)]


def _move_to_experiment(fault: Fault, site: str, table: str) -> Fault:
    """Return the fault of a site as a fault of a table of the experiment."""
    where = fault.where.replace(f"site.toml of {site}: data", table)
    remedy = fault.remedy.replace(f"[data] in site.toml of {site}", f"[{table}] of the experiment")
    return replace(fault, where=where, remedy=remedy)


def agree_on_pixels(forms: Forms, terms: PixelTerms) -> PixelForm | None:
    """Return the pixel form of a run from sites without a fault; None if no site states its form."""
    if not forms:
        return None
    values = {key: run.value for key, run in _choose_run_values(forms, terms).items()}
    size = values.pop("image_size")
    *depth, height, width = size if isinstance(size, list) else (size, size)
    color = values.pop("color")
    resize = values.pop("resize", None)
    color = color and not depth  # a network of three channels takes volumes, too, which are grey
    defaults = PixelForm(color=color, height=height, width=width)
    rendering = {key: value for key, value in values.items() if value != defaults.read_setting(key)}
    return PixelForm(
        color=color,
        height=height,
        width=width,
        depth=depth[0] if depth else None,
        resize=resize,
        rendering={key: tuple(value) if isinstance(value, list) else value for key, value in rendering.items()},
        only_grey=not color and all(form.only_grey for _, form in forms),
        decoded=any(form.decoded for _, form in forms),
        white_of_dark=0 if any(not form.white_of_dark for _, form in forms) else forms[0][1].white_of_dark,
        rules=forms[0][1].rules,
    )


def _choose_run_values(forms: Forms, terms: PixelTerms) -> dict[str, _RunValue]:
    """Return key -> the run's value, for each key with a meaning for a site, except keys that are left to each site."""
    extra = sorted({key for _, form in forms for key in form.rendering} - set(PIXEL_KEYS))  # of a newer release
    keys = [key for key in (*PIXEL_KEYS, *extra) if key not in terms.table.get(SITE_SPECIFIC_KEY, ())]
    stated = {key: value for key in keys if (value := terms.find_stated_value(key)) is not None}
    voters = list(forms)
    for key, run in stated.items():
        voters = _select_agreeing(voters, key, run.value)
    values = dict[str, _RunValue]()
    for key in keys:
        if key in stated:
            values[key] = stated[key]
        elif votes := _list_votes(voters, key) or _list_votes(forms, key):
            values[key] = _choose_run_value(votes, key, terms)
            voters = _select_agreeing(voters, key, values[key].value)
    return values


def _choose_run_value(votes: Sequence[tuple[str, Any]], key: str, terms: PixelTerms) -> _RunValue:
    sizes_differ = key == "image_size" and len({value for _, value in votes}) > 1
    if sizes_differ and terms.image_size in dict(votes).values():
        size = list(terms.image_size) if isinstance(terms.image_size, tuple) else terms.image_size
        return _RunValue(size, f"the network takes {size} (model.image_size)")
    return _choose_by_vote(votes, key)


def _list_votes(forms: Forms, key: str) -> list[tuple[str, Any]]:
    return [(site, _make_hashable(form.read_setting(key))) for site, form in forms if form.has_setting(key)]


def _select_agreeing(forms: Forms, key: str, value: Any) -> list[tuple[str, PixelForm]]:
    return [(site, form) for site, form in forms if _agrees(form, key, value)]


def _find_nearly_black_sites(forms: Forms, fitting: Forms, terms: PixelTerms) -> list[Fault]:
    """Return a fault for each site with nearly black images, unless the images of all other sites are as dark."""
    others_are_bright = any(not form.white_of_dark for _, form in fitting)
    if terms.begun is not None:
        others_are_bright = not terms.begun.white_of_dark
    if not others_are_bright:
        return []
    faults = list[Fault]()
    for site, form in forms:
        if not form.white_of_dark:
            continue
        problem = "its images are nearly black where 255 is white, and those of other sites are not."
        remedy = f"This line under [data] in site.toml of {site} says which value is white (of DICOM files, window "
        remedy += f"does):\n    {format_setting('value_range', [0, form.white_of_dark])}\nThe coordinator writes "
        remedy += f'{SITE_SPECIFIC_KEY} = ["value_range"] under [pixels] of the experiment, because the files of '
        remedy += "other sites have another range. If the images are that dark, write value_range = [0, 255]."
        faults.append(Fault(f"site.toml of {site}: data.value_range", problem, remedy, site))
    return faults


def _make_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _choose_by_vote(votes: Sequence[tuple[str, Any]], key: str = "rules") -> _RunValue:
    """Return the value of more than half of the sites; without such a majority, the value of the first site."""
    counts = Counter(value for _, value in votes)
    site, value = votes[0]
    reason = f"site {site}, which was admitted first, has {format_setting(key, value)}"
    for candidate, count in counts.items():
        if 2 * count > counts.total():
            value = candidate
            example = next(site for site, vote in votes if vote == candidate)
            reason = f"most sites have {format_setting(key, value)}, such as site {example}"
    return _RunValue(list(value) if isinstance(value, tuple) else value, reason)


def _agrees(form: PixelForm, key: str, value: Any) -> bool:
    """Return True if a site's images become the same pixels as with the run's value of a key."""
    if not form.has_setting(key) or form.read_setting(key) == value:
        return True
    return key == "color" and bool(value) and form.only_grey


def _make_pixel_fault(site: str, form: PixelForm, key: str, run: _RunValue) -> Fault:
    """Return the fault of a site that reads its images in another way than the run, with the line that fixes it."""
    setting_of_site = format_setting(key, form.read_setting(key))
    line = format_setting(key, run.value)
    problem = f"its images become other pixels than the run's: {setting_of_site} here; {run.reason}."
    if key == "color" and not form.decoded:
        kind = "colour" if run.value else "grey"
        remedy = f"Its kind of data is read as it is stored: store it in {kind}, or let the coordinator write "
        remedy += f"color = {'false' if run.value else 'true'} under [pixels] of the experiment."
        return Fault(f"site.toml of {site}: data", problem, remedy, site)
    remedy = f"This line under [data] in site.toml of {site} settles it:\n    {line}"
    if run.value is None:
        remedy = f"Leave {key} out under [data] in site.toml of {site}."
    elif key == "image_size" and isinstance(run.value, list) and len(run.value) == 2:
        remedy = f"Store the images with {run.value[0]} × {run.value[1]} pixels."
    if run.is_of_model:
        remedy += "\nIf grey is meant at all hospitals, the coordinator writes color = false under [pixels] of the "
        remedy += "experiment."
    elif key in RENDERING_KEYS:
        remedy += "\nIf its files differ, and this is right for them, the coordinator writes "
        remedy += f'{SITE_SPECIFIC_KEY} = ["{key}"] under [pixels] of the experiment.'
    return Fault(f"site.toml of {site}: data.{key}", problem, remedy, site)
