"""The points that a run's sites must agree on before round 1: words, pixels, sizes, counts, level and release.

``flwr-client check`` shows them for one hospital, ``flwr-server status --contract`` for all that are connected.
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
POINTS: tuple[PointName, ...] = ("words", "pixels", "sizes", "counts", "level", "release")
WIDTH = 80
"""Characters of a line of a table."""
NOT_STATED = "not stated"
_LINE = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class ContractPoint:
    """One point of the contract at one site.

    Attributes:
        here: The site's value, in words.
        run: The run's value, in words; empty if the run leaves it to the sites.
        faults: Why the two do not fit; empty if they do.
    """

    name: PointName
    here: str
    run: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def lines_to_write(self) -> tuple[str, ...]:
        """The lines of ``site.toml`` that settle the faults, the first of each fault."""
        return tuple(dict.fromkeys(line for fault in self.faults for line in _LINE.findall(fault.remedy)[:1]))

    def as_json(self) -> dict[str, Any]:
        return {
            "here": self.here,
            "run": self.run,
            "agreed": not self.faults,
            "faults": [{"problem": str(fault.problem), "remedy": fault.remedy} for fault in self.faults],
            "write": list(self.lines_to_write),
        }


def describe_words(declaration: LabelDeclaration) -> str:
    """List a site's classes; a class that the site names differently as ``OWN as CLASS``."""
    pairs = zip(declaration.names, declaration.canonical_names, strict=True)
    return ", ".join(name if own == name else f"{own} as {name}" for own, name in pairs)


def make_pixel_points(
    form: PixelForm | None, terms: PixelTerms, faults: Sequence[Fault]
) -> tuple[ContractPoint, ContractPoint]:
    """Return the points of pixels and of sizes of one site.

    Args:
        form: How the site's images become pixels; None if the site does not state it.
        terms: What the run says about pixels.
        faults: Why the form does not fit the run.
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
    """Return how a site's images become pixels, without their size."""
    if form is None:
        return NOT_STATED
    first, _, *rest = form.describe().split(", ", maxsplit=2)
    return ", ".join([first, *rest])


def _describe_pixel_terms(terms: PixelTerms) -> str:
    """Return what a run says about pixels, without their size; empty if it leaves all to the sites."""
    stated = {key: value for key, value in terms.table.items() if key not in (SITE_SPECIFIC_KEY, "image_size")}
    if "color" not in stated and terms.channels == 3 and isinstance(terms.image_size, int):
        stated["color"] = True
    return ", ".join(format_setting(key, value) for key, value in sorted(stated.items()))


def describe_protection(plan: HospitalPlan) -> str:
    """Name the protection of a run's updates: masks, noise with its level, both, or neither."""
    masks = ["masks"] if plan.privacy.secure_aggregation else []
    noise = [f"noise ({plan.privacy.level})"] if plan.privacy.level != "none" else []
    return " and ".join(masks + noise) or "neither masks nor noise"


def describe_release(release: str, wire: int) -> str:
    """Return a release, with its wire version if that is not ours."""
    return f"{release} (wire {wire})" if wire != WIRE_VERSION else release


def make_point_table(points: Sequence[ContractPoint]) -> Table:
    """Return the table of one site: each point with the site's value, the run's, and the line to write."""
    table = fold_long_words(Table("", "here", "the run", "to write", width=WIDTH))
    for point in points:
        to_write = "\n".join(point.lines_to_write) or ("differs: see above" if point.faults else "")
        style = "bold red" if point.faults else ""
        mark = f"{point.name}{' !' if point.faults else ''}"
        table.add_row(Text(mark, style=style), Text(point.here), Text(point.run or "any"), Text(to_write))
    return table
