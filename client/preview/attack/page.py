"""The page and the JSON form of what the attacks found: figures and pictures, for this hospital only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from client.preview.attack.coverage import BY_FIELD, BY_STATISTIC, NOT_TRIED
from client.preview.attack.kinds.attempt import Attempt
from client.site.site import Site
from common import __version__
from common.config import Plan
from common.system.files import write_atomically
from common.system.pages import page_environment


def as_json(site: Site, plan: Plan, found: Sequence[Attempt]) -> dict[str, Any]:
    """All figures; no picture."""
    return {
        "site": site.name,
        "version": __version__,
        "level": site.policy.level,
        "policy": site.policy.model_dump(mode="json"),
        "method": plan.run.method,
        "attacks": [
            {
                "name": one.name,
                "tried": one.tried,
                "recovered": one.recovered,
                "of": one.of,
                "things": one.things,
                "by_chance": one.by_chance,
                "notes": list(one.notes),
                "stops": one.stops,
                "declined": one.declined,
                "refusals": list(one.said.refusals),
                "seconds": round(one.seconds, 1),
            }
            for one in found
        ],
        "fields": {record: {name: _covered(by) for name, by in fields.items()} for record, fields in BY_FIELD.items()},
        "statistics": {name: _covered(by) for name, by in BY_STATISTIC.items()},
        "not_tried": list(NOT_TRIED),
    }


def _covered(by: tuple[str, ...] | str) -> Any:
    return {"attacks": list(by)} if isinstance(by, tuple) else {"reason": by}


def _code(text: str) -> Markup:
    """Show what stands in backquotes as code."""
    parts = text.split("`")
    shown = (Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts))
    return Markup("").join(shown)


def write_page(site: Site, plan: Plan, found: Sequence[Attempt], out: Path) -> Path:
    """Write the page, readable by its owner only: it shows patients' images."""
    environment = page_environment(Path(__file__).parent)
    environment.globals.update(code=_code)
    template = environment.get_template("attack.html.j2")
    text = template.render(site=site.name, level=site.policy.level, plan=plan, found=found, not_tried=NOT_TRIED)
    write_atomically(out, text.encode(), private=True)
    return out
