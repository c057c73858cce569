"""Tables of docs/papers.md: the claims of each paper with our verdict, from ``docs/tables/claims.csv``.

The file has the figures of the paper and ours beside each claim. ``make reference`` writes the tables.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from supply.blocks import format_table

CLAIMS = Path(__file__).parents[1] / "docs" / "tables" / "claims.csv"
HEADINGS = ["paper", "claim", "in the paper", "here", "verdict"]
VERDICTS = ("holds", "does not hold", "not decided", "not tested")


class Claim(NamedTuple):
    """A row of the file.

    Attributes:
        paper: Method of the paper.
        claim: What the paper says.
        theirs: Figures of the paper.
        ours: Figures that we measured.
        verdict: One of ``VERDICTS``, by the rule on the page, with a reason; or one for each half of the claim.
    """

    paper: str
    claim: str
    theirs: str
    ours: str
    verdict: str


def read_claims() -> list[Claim]:
    """Return the rows of the file in their order.

    Raises:
        ValueError: If the file has other columns.
    """
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        headings, *rows = csv.reader(file)
    if headings != HEADINGS:
        raise ValueError(f"{CLAIMS} must have the columns {HEADINGS}, not {headings}")
    return [Claim(*row) for row in rows]


def list_blocks_of_claims() -> dict[str, str]:
    """Return block -> text of docs/papers.md: the claims of a paper with our verdicts."""
    claims = read_claims()
    papers = dict.fromkeys(claim.paper for claim in claims)
    return {
        f"claims of {paper}": format_table(
            ("claim", "verdict"),
            [(claim.claim, claim.verdict) for claim in claims if claim.paper == paper],
        )
        for paper in papers
    }
