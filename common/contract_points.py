"""The settings on which all sites of a run must agree before round 1: words, pixels, sizes, counts, level and release.

``flwr-client check`` prints them for one hospital, ``flwr-server status --contract`` for all hospitals that are
connected.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import Fault
from polyclinic.common.pixel_contract import PixelTerms
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.data.base.pixel_form import SITE_SPECIFIC_KEY, PixelForm, format_setting
from polyclinic.data.base.spec import format_image_size

PointName = Literal["words", "pixels", "sizes", "counts", "level", "release"]
POINT_NAMES: tuple[PointName, ...] = ("words", "pixels", "sizes", "counts", "level", "release")
TABLE_WIDTH = 80
"""Width of the printed table, in characters."""
NOT_STATED = "not stated"
_INDENTED_LINE = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
"""A line of configuration within a fault's remedy, which is indented by four spaces."""


@dataclass(frozen=True)
class ContractPoint:
    """One setting of the contract at one site.

    Attributes:
        name: Name of the setting.
        here: The site's value, in words.
        run: The run's value, in words; empty if the run leaves it to the sites.
        faults: Reasons why the two values do not fit; empty if they do.
    """

    name: PointName
    here: str
    run: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def lines_to_write(self) -> tuple[str, ...]:
        """The lines for ``site.toml`` that fix the faults, one for each fault."""
        return tuple(dict.fromkeys(line for fault in self.faults for line in _INDENTED_LINE.findall(fault.remedy)[:1]))

    def as_json(self) -> dict[str, Any]:
        return {
            "here": self.here,
            "run": self.run,
            "agreed": not self.faults,
            "faults": [{"problem": str(fault.problem), "remedy": fault.remedy} for fault in self.faults],
            "write": list(self.lines_to_write),
        }


def describe_words(declaration: LabelDeclaration) -> str:
    """List a site's classes as text; a class for which the site has another word is ``WORD as CLASS``."""
    pairs = zip(declaration.names, declaration.canonical_names, strict=True)
    return ", ".join(name if own == name else f"{own} as {name}" for own, name in pairs)


def make_pixel_points(
    form: PixelForm | None, terms: PixelTerms, faults: Sequence[Fault]
) -> tuple[ContractPoint, ContractPoint]:
    """Return two contract points of one site: its pixels, and its image size.

    Args:
        form: How the site decodes its images; None if the site does not state it.
        terms: The run's pixel settings.
        faults: Faults of ``form`` under ``terms``.
    """
    size_faults = tuple(fault for fault in faults if fault.where.endswith(".image_size"))
    other_faults = tuple(fault for fault in faults if fault not in size_faults)
    size = NOT_STATED
    if form is not None:
        size = " × ".join(map(str, form.volume_size or (form.height, form.width)))
    return (
        ContractPoint("pixels", _describe_pixels(form), _describe_pixel_terms(terms), other_faults),
        ContractPoint("sizes", size, format_image_size(terms.image_size), size_faults),
    )


def _describe_pixels(form: PixelForm | None) -> str:
    """Return a site's pixel settings as text, without the image size."""
    if form is None:
        return NOT_STATED
    first, _, *rest = form.describe().split(", ", maxsplit=2)
    return ", ".join([first, *rest])


def _describe_pixel_terms(terms: PixelTerms) -> str:
    """Return a run's pixel settings as text, without the image size; empty if the run leaves all to the sites."""
    stated = {key: value for key, value in terms.table.items() if key not in (SITE_SPECIFIC_KEY, "image_size")}
    if "color" not in stated and terms.channels == 3 and isinstance(terms.image_size, int):
        stated["color"] = True
    return ", ".join(format_setting(key, value) for key, value in sorted(stated.items()))


def describe_protection(plan: HospitalPlan) -> str:
    """Return the protection of a run's updates as text: masks, noise with its level, both, or neither."""
    masks = ["masks"] if plan.privacy.secure_aggregation else []
    noise = [f"noise ({plan.privacy.level})"] if plan.privacy.level != "none" else []
    return " and ".join(masks + noise) or "neither masks nor noise"


def describe_release(release: str, wire: int) -> str:
    """Return a site's release as text, with its wire version if that differs from the version of this program."""
    return f"{release} (wire {wire})" if wire != WIRE_VERSION else release


def make_point_table(points: Sequence[ContractPoint]) -> Table:
    """Return the table of one site: a row per contract point, with the site's value, the run's value, and the line to
    write.
    """
    table = fold_long_words(Table("", "here", "the run", "to write", width=TABLE_WIDTH))
    for point in points:
        to_write = "\n".join(point.lines_to_write) or ("differs: see above" if point.faults else "")
        style = "bold red" if point.faults else ""
        mark = f"{point.name}{' !' if point.faults else ''}"
        table.add_row(Text(mark, style=style), Text(point.here), Text(point.run or "any"), Text(to_write))
    return table
