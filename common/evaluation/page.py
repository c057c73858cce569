"""Write the HTML page of an evaluation, and its JSON and csv files."""

import json
from pathlib import Path

from markupsafe import Markup

from polyclinic.common.evaluation.evaluation import Evaluation
from polyclinic.common.evaluation.figures import FigureRow
from polyclinic.common.evaluation.results import (
    describe_data,
    describe_test,
    format_p,
    list_limitations,
    list_main_data,
    make_comparisons_csv,
    make_figures_csv,
    make_json,
)
from polyclinic.common.reporting.figure import ROW_HEIGHT, draw_figure, make_marker_entry
from polyclinic.common.reporting.page import write_html_page
from polyclinic.common.reporting.plot import Axis, Plot
from polyclinic.common.reporting.svg import DOTTED, LINE_COLOR, choose_series_styles
from polyclinic.common.system.files import remove_outputs_on_failure, write_atomically

PAGE_FILE = "evaluation.html"
JSON_FILE = "evaluation.json"
FIGURES_FILE = "figures.csv"
COMPARISONS_FILE = "comparisons.csv"
TEMPLATE_FOLDER = Path(__file__).parent
MAX_PLOT_ROWS = 40
"""Maximum number of rows in a plot; the tables contain all rows."""


def write_evaluation_folder(evaluation: Evaluation, folder: Path, title: str, *, private: bool) -> Path:
    """Write the page, the JSON file and the csv files of an evaluation; return the path of the page.

    Args:
        evaluation: The evaluation.
        folder: Destination folder, created if needed.
        title: Heading of the page.
        private: True if only the owner may read the files, because they are about the images of one hospital.
    """
    with remove_outputs_on_failure(folder):
        write_atomically(
            folder / JSON_FILE, f"{json.dumps(make_json(evaluation), indent=1)}\n".encode(), private=private
        )
        write_atomically(folder / FIGURES_FILE, make_figures_csv(evaluation), private=private)
        write_atomically(folder / COMPARISONS_FILE, make_comparisons_csv(evaluation), private=private)
        return _write_page(evaluation, folder / PAGE_FILE, title, private=private)


def _write_page(evaluation: Evaluation, path: Path, title: str, *, private: bool) -> Path:
    figures = evaluation.figures
    main = list_main_data(evaluation)
    return write_html_page(
        "evaluation.html.j2",
        path,
        (TEMPLATE_FOLDER,),
        private=private,
        title=title,
        evaluation=evaluation,
        sentences=[describe_data(data) for data in evaluation.data],
        limits=list(list_limitations(evaluation)),
        plots=[(data, draw_aurocs(evaluation, data, number)) for number, data in enumerate(main)],
        tables=[(data, [row for row in figures.rows if row.data == data and not row.column]) for data in main],
        subgroups=[(column, select_subgroup_rows(evaluation, column)) for column in evaluation.columns],
        compared=[(data, [each for each in figures.comparisons if each.data == data]) for data in main],
        test_sentence=describe_test(list(figures.comparisons)),
        format_p=format_p,
        over="patients" if figures.over_patients else "images",
    )


def select_subgroup_rows(evaluation: Evaluation, column: str) -> list[FigureRow]:
    """Return the rows of an evaluation for the subgroups of one column, such as the sex."""
    return [row for row in evaluation.figures.rows if row.column == column]


def draw_aurocs(evaluation: Evaluation, data: str, number: int) -> Markup | None:
    """Draw the AUROC of each class and model on a data set, with intervals; return None if no class has an AUROC.

    Args:
        evaluation: The evaluation.
        data: Name of the data set.
        number: Number of the figure on the page.
    """
    rows = [
        row for row in evaluation.figures.rows if row.data == data and not row.column and row.figures.auroc is not None
    ]
    classes = list(dict.fromkeys(row.class_name for row in rows))
    models = [model.name for model in evaluation.models]
    classes = classes[: max(1, MAX_PLOT_ROWS // len(models))]
    if not rows:
        return None
    styles = dict(zip(models, choose_series_styles(len(models)), strict=True))
    step = 1 / (len(models) + 1)
    plot = Plot(x=Axis("AUROC", limits=(0, 1), grid=True), y=Axis())
    plot.y.label_rows(classes)
    plot.add_vertical_rule(0.5, LINE_COLOR, dash=DOTTED)
    for row in rows:
        auroc = row.figures.auroc
        interval = row.figures.auroc_interval
        if row.class_name not in classes or auroc is None:
            continue
        y = classes.index(row.class_name) - 0.5 + step * (models.index(row.model) + 1)
        style = styles[row.model]
        if interval is not None:
            plot.add_interval(*interval, y, style.color, 1.4)
        plot.add_markers([auroc], [y], style.marker, style.color, 7)
    height = ROW_HEIGHT * max(1.0, 0.6 * len(models)) * len(classes) + 6
    legend = [make_marker_entry(name, style) for name, style in styles.items()]
    description = f"AUROC of each class with 95 % intervals: {data}"
    return draw_figure([plot], f"auroc-{number}", description, height=height, legend=legend)
