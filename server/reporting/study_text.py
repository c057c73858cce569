"""A study's tables as JSON and as Markdown."""

from dataclasses import asdict

from common.system.formatting import counted
from common.system.plain_text import json_text
from server.analysis.study.results import PairedComparison, PublishedNumber, StudyResult, TableResult
from server.reporting.study_claims import study_headline
from server.reporting.wording import number, probability, signed, spans, spread


def as_json(result: StudyResult) -> str:
    """Everything, with a line feed at the end."""
    return json_text(asdict(result), indent=1, allow_nan=True) + "\n"


def as_markdown(result: StudyResult) -> str:
    """All tables, ours and the paper's in one cell, and what differs."""
    parts = [
        f"# {result.title}",
        study_headline(result),
        f"{result.paper}. Seeds {spans(result.seeds)}; ours (paper's).",
    ]
    parts += [_listing("What differs in all tables:", result.differs)] if result.differs else []
    parts += [_table(table) for table in result.tables]
    return "\n\n".join(parts) + "\n"


def cell(entry: PublishedNumber) -> str:
    """Ours over the seeds, the paper's in brackets."""
    ours = shown(entry)
    return ours if entry.paper is None else f"{ours} ({number(entry.paper)})"


def shown(entry: PublishedNumber) -> str:
    """Ours over the seeds: three decimals for shares, fewer for amounts."""
    mean = entry.ours.mean
    if mean is None or abs(mean) < 10:
        return spread(entry.ours)
    sd = "" if entry.ours.sd is None else f" ± {entry.ours.sd:,.1f}"
    return f"{mean:,.1f}{sd}"


def _table(table: TableResult) -> str:
    head = [*(["setting"] if any(table.settings) else []), "method", *table.headings]
    lines = [head, ["---:" if name in table.headings else "---" for name in head]]
    for index, setting in enumerate(table.settings):
        for method, row in zip(table.methods, table.entries, strict=True):
            lines.append([setting, method, *map(cell, row[index])][-len(head) :])
    text = "\n".join(f"| {' | '.join(part.replace('|', '&#124;') for part in line)} |" for line in lines)
    below = [_listing("Here:", run_here(table))]
    below += [sentence] if (sentence := untrained_sentence(table)) else []
    below += [_listing("What differs:", table.differs)] if table.differs else []
    below += [_listing(f"{table.reference} against:", [_tested(each) for each in table.tests])] if table.tests else []
    return "\n\n".join([f"## {table.title}", text, *below])


def run_here(table: TableResult) -> list[str]:
    """What was run, one line where all settings had the same."""
    if len(set(table.scale)) == 1:
        return [table.scale[0]]
    return [f"{setting}: {scale}" for setting, scale in zip(table.settings, table.scale, strict=True)]


def untrained_sentence(table: TableResult) -> str:
    """Which figures are of a model without training; empty where none is."""
    if not table.untrained:
        return ""
    named = [method + (f", {setting}" if setting else "") for method, setting, _ in table.untrained]
    runs = counted(sum(count for *_, count in table.untrained), "run")
    return f"In {runs} validation was best before round 1, and the initial model is tested: {'; '.join(named)}."


def _tested(tested: PairedComparison) -> str:
    test, pairs = tested.result, "classes" if tested.setting else "settings"
    where = f" ({tested.setting})" if tested.setting else ""
    if test.holm_p is None:
        return f"{tested.other}{where}: not tested: {test.reason}"
    difference = f"{signed(test.mean_difference)}, {probability(test.holm_p)}"
    return f"{tested.other}{where}: {difference} after Holm's correction, {test.pairs} {pairs}"


def _listing(title: str, lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])
