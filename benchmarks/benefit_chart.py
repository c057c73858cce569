"""Draw docs/benefit.svg, the bar chart of the README, from the published runs of the benchmark.

PYTHONPATH=. python benchmarks/benefit_chart.py
"""

from pathlib import Path

from polyclinic.studies.benchmark import read_benchmark_result
from polyclinic.studies.benchmark_results import BenchmarkResult, MethodOverallResult

FOLDER = Path("experiments/benchmark")
CHART = Path("docs/benefit.svg")
BARS = {
    "individual": "each hospital alone",
    "vanilla": "plain averaging (missing label = absent)",
    "partial_loss": "partial loss (missing label left out)",
    "surgical": "surgical aggregation",
    "polyclinic": "ours (one model is passed on)",
}
"""Rows of the benchmark in the order of the bars, in the words of the chart."""
CEILING = "centralised, masked"
COLOURS = {"individual": "#777777", "vanilla": "#b5452c", "polyclinic": "#0b7a6b"}
OTHER_COLOUR = "#1f5f99"
CHANCE = 0.5
"""AUROC of a model that knows nothing, where the bars begin."""
LEFT, RIGHT, TOP = 356, 780, 34  # of the bars, in pixels
HIGHEST = 0.9
BAR_HEIGHT, BAR_DISTANCE = 20, 34


def find_x(auroc: float) -> float:
    """Return the horizontal place of an AUROC in pixels."""
    return LEFT + (auroc - CHANCE) / (HIGHEST - CHANCE) * (RIGHT - LEFT)


def draw_bar(row: MethodOverallResult, top: float) -> list[str]:
    """Draw a row's name, bar, 95 % interval and figure; ``top`` is the upper edge of the bar in pixels."""
    assert row.auroc is not None
    middle = top + BAR_HEIGHT / 2
    end = find_x(row.auroc)
    colour = COLOURS.get(row.label, OTHER_COLOUR)
    lines = [
        f'<text x="{LEFT - 12}" y="{middle + 5:.1f}" text-anchor="end" fill="#222">{BARS[row.label]}</text>',
        f'<rect x="{LEFT}" y="{top:.1f}" width="{end - LEFT:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>',
    ]
    if row.half_width is not None:
        low, high = find_x(row.auroc - row.half_width), find_x(row.auroc + row.half_width)
        whisker = f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"'
        lines.append(f'{whisker} stroke="#111" stroke-width="2"/>')
    figure = f'<text x="{RIGHT + 30}" y="{middle + 5:.1f}" fill="#222" font-weight="600">{row.auroc:.3f}</text>'
    return [*lines, figure]


def draw_benefit_chart(result: BenchmarkResult) -> str:
    """Return the chart as SVG: a bar from chance to the mean test AUROC for each row of :data:`BARS`."""
    rows = {row.label: row for row in result.methods}
    ceiling = rows[CEILING].auroc
    assert ceiling is not None
    bottom = TOP + BAR_DISTANCE * len(BARS)
    place = find_x(ceiling)
    words = ", ".join(f"{name} {rows[label].auroc:.3f}" for label, name in BARS.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {bottom + 46}" '
        'font-family="system-ui, sans-serif" font-size="15" role="img">',
        f"<title>Mean test AUROC over five data sets: {words}; all images in one place {ceiling:.3f}</title>",
        f'<rect width="860" height="{bottom + 46}" rx="8" fill="#fff"/>',
        f'<text x="{place:.1f}" y="20" text-anchor="end" fill="#444" font-size="13">'
        f"all images in one place, same labels: {ceiling:.3f}</text>",
    ]
    for number, label in enumerate(BARS):
        lines += draw_bar(rows[label], TOP + BAR_DISTANCE * number)
    lines.append(
        f'<line x1="{place:.1f}" x2="{place:.1f}" y1="26" y2="{bottom}" stroke="#444" stroke-dasharray="4 4"/>'
    )
    for auroc in (0.5, 0.6, 0.7, 0.8, 0.9):
        lines.append(
            f'<text x="{find_x(auroc):.1f}" y="{bottom + 14}" text-anchor="middle" fill="#444" font-size="13">'
            f"{auroc:.1f}</text>"
        )
    lines += [
        f'<text x="{(LEFT + RIGHT) / 2:.1f}" y="{bottom + 34}" text-anchor="middle" fill="#444" font-size="13">'
        "mean test AUROC (0.5 is chance); black line: 95 % interval over patients and seeds</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the chart."""
    result = read_benchmark_result(FOLDER, "published", FOLDER / "published.jsonl")
    CHART.write_text(draw_benefit_chart(result), encoding="utf-8")


if __name__ == "__main__":
    main()
