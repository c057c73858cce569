"""The files of docs/tables: every one is on a page, and the figures that pages and claims take from them are there."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from polyclinic.common.metrics.holm import adjust_by_holm
from supply.claims import CLAIMS, VERDICTS, read_claims

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "tables").glob("*.csv"))
STUDIES = [path for path in FILES if path not in (CLAIMS, DOCS / "tables" / "designs.csv")]
MEAN_AND_SD = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")


def read_rows(name: str) -> list[dict[str, str]]:
    with (DOCS / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def list_means_and_sds(texts: Iterable[str]) -> set[tuple[float, float]]:
    """Return each mean with its SD as parts of one; those above one are in percent."""
    figures = [(float(mean), float(sd)) for text in texts for mean, sd in MEAN_AND_SD.findall(text)]
    scales = [0.01 if mean > 1 else 1 for mean, _ in figures]
    return {(round(mean * scale, 3), round(sd * scale, 3)) for (mean, sd), scale in zip(figures, scales, strict=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_as_many_cells_in_every_row_and_a_link_from_a_page(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "" not in rows[0]
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    assert any(f"](tables/{path.name})" in page for page in pages)


def test_every_mean_of_a_claim_and_of_the_studies_on_the_page_of_results_is_in_a_file_of_a_study() -> None:
    measured = list_means_and_sds(path.read_text(encoding="utf-8") for path in STUDIES)
    ours = list_means_and_sds(claim.ours for claim in read_claims())
    _, _, sentences = (DOCS / "results.md").read_text(encoding="utf-8").partition("### A frozen trunk")
    on_page = list_means_and_sds([sentences])
    assert len(ours) > 20
    assert len(on_page) > 3
    assert (ours | on_page) - measured == set()


def test_every_claim_has_one_of_the_four_verdicts() -> None:
    claims = read_claims()
    assert len(claims) > 40
    assert [claim for claim in claims if not any(verdict in claim.verdict for verdict in VERDICTS)] == []
    tested = [claim for claim in claims if "not tested" not in claim.verdict]
    assert [claim for claim in tested if not claim.ours] == []


@pytest.mark.parametrize("sweep", ["hospitals", "shared classes"])
def test_the_leads_of_the_sweeps_in_the_claims_are_those_of_their_file(sweep: str) -> None:
    """The file has three digits, so that a lead may differ by 0.001 and p by a tenth."""
    rows = [row for row in read_rows("surgical-sweeps") if row["sweep"] == sweep]
    means = {
        method: np.array([float(row[method].partition(" ")[0]) for row in rows])
        for method in ("surgical", "partial_loss", "vanilla")
    }
    words = {"hospitals": "Sweep over the number of hospitals", "shared classes": "Sweep over shared classes"}[sweep]
    claims = [claim for claim in read_claims() if claim.claim.startswith(words)]
    stated = [re.search(r"\+(0\.\d+), (\d) of 7, p = (0\.\d+) \(Holm\D*(0\.\d+)\)", claim.ours) for claim in claims]
    others = ("partial_loss", "vanilla")
    p_values = [float(ttest_rel(means["surgical"], means[other]).pvalue) for other in others]
    for match, other, p, adjusted in zip(stated, others, p_values, adjust_by_holm(p_values), strict=True):
        assert match is not None
        assert adjusted is not None
        leads = means["surgical"] - means[other]
        assert float(match[1]) == pytest.approx(leads.mean(), abs=0.001)
        assert int(match[2]) == (leads > 0).sum()
        assert float(match[3]) == pytest.approx(p, rel=0.1)
        assert float(match[4]) == pytest.approx(adjusted, rel=0.1)
