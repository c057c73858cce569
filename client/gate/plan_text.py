"""A plan as it came, looked at before anything parses it whole: size, depth, numbers, keys, texts.

pydantic takes the last of two equal keys, NaN in a place without a schema, and as much of each as there is.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from common.config import Plan, plan_of_text
from common.errors import BadInput, Fault
from common.system.toml import explained

KB = 1000
DEEPEST = 8
"""Tables and lists in one another; an experiment's plan has three."""
MOST_DIGITS = 40
LONGEST_TEXT = 500
LONGEST_REASON = 400
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class PlanRefused(ValueError):
    """A plan that a site does not read.

    Attributes:
        rule: The rule's name, for the audit.
    """

    def __init__(self, rule: str, reason: str) -> None:
        self.rule = rule
        super().__init__(plain(reason))


def read_plan(text: object, maximum_kb: float | None) -> Plan:
    """Read a plan that a coordinator sent.

    Args:
        text: JSON.
        maximum_kb: Of the site's policy; None for no limit.

    Raises:
        PlanRefused: With the rule that it breaks.
    """
    if not isinstance(text, str):
        raise PlanRefused("plan.form", "it is not text")
    length = len(text.encode(errors="replace"))
    if maximum_kb is not None and length > maximum_kb * KB:
        raise PlanRefused("policy.maximum_plan_kb", f"it is {maximum_kb:g}, and the plan has {length / KB:.1f} kB")
    return _plan_in(text)


@lru_cache(maxsize=4)
def _plan_in(text: str) -> Plan:
    """The plan; read once, for every request of a run holds the same."""
    if (deep := _depth(text)) > DEEPEST:
        raise PlanRefused("plan.form", f"it is nested {deep} deep; {DEEPEST} is the most")
    try:
        json.loads(text, object_pairs_hook=_table, parse_constant=_no_number, parse_int=_whole, parse_float=_fraction)
        return plan_of_text(text)
    except ValidationError as error:
        raise PlanRefused("plan.form", told(explained(error, Plan, "plan"))) from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, PlanRefused) else PlanRefused("plan.form", f"it is no JSON: {error}") from None


def told(faults: Sequence[Fault]) -> str:
    """The first of a plan's faults in one line."""
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{faults[0]}".removesuffix(".") + more


def refused(error: BadInput) -> PlanRefused:
    """A plan whose method cannot be built."""
    return PlanRefused("plan.method", told(error.faults))


def plain(text: str) -> str:
    """A coordinator's words as they may stand in a log: short, one line, nothing but ASCII that shows."""
    escaped = text.encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in escaped)
    return shown if len(shown) <= LONGEST_REASON else f"{shown[:LONGEST_REASON]}..."


def _depth(text: str) -> int:
    """How deep tables and lists stand in one another; brackets within texts do not count."""
    depth = deepest = 0
    for letter in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if letter in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanRefused("plan.form", f'it has the key "{twice}" twice in one table')
    for text in (*table, *(value for value in table.values() if isinstance(value, str))):
        if len(text) > LONGEST_TEXT:
            raise PlanRefused("plan.form", f"it has a text of {len(text)} characters; {LONGEST_TEXT} is the most")
    return table


def _no_number(name: str) -> Any:
    raise PlanRefused("plan.form", f"it has {name} in the place of a number")


def _whole(digits: str) -> int:
    return int(_bounded(digits))


def _fraction(digits: str) -> float:
    value = float(_bounded(digits))
    return value if abs(value) != float("inf") else _no_number(digits)


def _bounded(digits: str) -> str:
    if len(digits) > MOST_DIGITS:
        raise PlanRefused("plan.form", f"it has a number of {len(digits)} digits; {MOST_DIGITS} is the most")
    return digits
