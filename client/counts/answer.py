"""The answer to a question for counts: counts of the site's sheet, sent openly or masked for secure aggregation."""

import hashlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.counts.noise import TABLES_WITHOUT_NOISE
from polyclinic.client.counts.sheet import CountSheet, get_count_sheet
from polyclinic.client.site.disclosure import round_count_down
from polyclinic.client.site.plans import COUNT_KIND, RequestText, store_request_text
from polyclinic.client.site.site import Site
from polyclinic.client.training.secure_aggregation import HeldUpdate, HeldUpdateStore, open_masked_round_store
from polyclinic.common.counts import (
    CLASS_TABLE,
    MASKED_ROW_LENGTH,
    MASKED_TABLES,
    count_numbers_of_value,
    list_row_values,
    list_states,
    make_row_name,
    parse_count_question,
)
from polyclinic.common.models.network import Head
from polyclinic.common.vocabulary import group_words_by_class
from polyclinic.common.wire.counts import COUNT_ROUND, CountReply, CountRequest
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.privacy.secure_aggregation.site import MaskingConditions, RequestHashes, SiteMaskingRound
from polyclinic.strategies.privacy.secure_aggregation.vectors import FIXED_POINT_ONE


def answer_count_request(site: Site, request: CountRequest, held_updates: HeldUpdateStore) -> CountReply:
    """Answer a question from the site's count sheet; make the sheet first if there is none.

    Args:
        held_updates: Store for the counts that leave only in a sum over sites.

    Raises:
        BadInput: If the site has too few patients, or its privacy budget does not suffice for a noisy sheet.
        ValueError: If the request's text is not a question for counts.
    """
    question = parse_count_question(request.question)
    policy = site.policy
    if site.durable:
        store_request_text(site, RequestText(COUNT_KIND, request.question))
    sheet = get_count_sheet(site, request.run)
    groups = group_words_by_class(site.declaration.canonical_names, question.vocabulary or {})
    words_by_class = {name: words for name, words in groups.items() if not question.classes or name in question.classes}
    unavailable: tuple[str, ...] = TABLES_WITHOUT_NOISE if sheet.noise else ()
    if policy.masked_only and not sheet.noise:
        unavailable = tuple(table for table in question.asked_tables if table not in MASKED_TABLES)
    permitted = [table for table in question.asked_tables if table in policy.counts and table not in unavailable]
    reply = CountReply(
        run=request.run,
        site=site.name,
        level=policy.level,
        as_of=sheet.made,
        smallest_count=policy.smallest_count,
        class_names=tuple(word for words in words_by_class.values() for word in words),
        allowed=tuple(table for table in permitted if table not in sheet.missing),
        refused=tuple(table for table in question.asked_tables if table not in permitted),
        missing=tuple(table for table in permitted if table in sheet.missing),
        noise=sheet.noise,
    )
    if policy.masked_only and not sheet.noise:
        return _hold_counts_for_sum(site, request, reply, sheet, words_by_class, held_updates)
    return _add_cells(site, reply, sheet)


def _add_cells(site: Site, reply: CountReply, sheet: CountSheet) -> CountReply:
    """Return the reply with the sheet's counts of its allowed tables and classes."""
    classes = {"", *reply.class_names}
    keys = [key for key in sorted(sheet.cells) if key[0] in reply.allowed and key[1] in classes]
    numbers = [sheet.cells[key] for key in keys]
    if not sheet.noise:
        numbers = [
            (round_count_down(patients, site.policy), round_count_down(images, site.policy))
            for patients, images in numbers
        ]
    return replace(
        reply,
        tables=tuple(key[0] for key in keys),
        classes=tuple(key[1] for key in keys),
        states=tuple(key[2] for key in keys),
        values=tuple(key[3] for key in keys),
        patients=tuple(patients for patients, _ in numbers),
        images=() if sheet.noise else tuple(images for _, images in numbers),
    )


def _hold_counts_for_sum(
    site: Site,
    request: CountRequest,
    reply: CountReply,
    sheet: CountSheet,
    words_by_class: dict[str, tuple[str, ...]],
    held_updates: HeldUpdateStore,
) -> CountReply:
    """Store the counts until secure aggregation masks them; return the reply with the names of their rows.

    Args:
        words_by_class: Class of the study -> the site's class names for it. The counts of several names cannot be
            added, because an image may show both; such a class counts as hidden.
    """
    held_updates.drop_held_update(site)
    rows = dict[str, NDArray[np.float32]]()
    for table in reply.allowed:
        is_by_class = table == CLASS_TABLE or table.startswith("class_by_")
        for name, words in words_by_class.items() if is_by_class else [("", ("",))]:
            word = words[0] if len(words) == 1 else None
            rows[make_row_name(table, name)] = _make_masked_row(site, sheet, table, word)
    if not rows:
        return reply
    names = tuple(sorted(rows))
    numbers = np.stack([rows[name] for name in names])
    policy = site.policy
    # Another sum of the same sheet must have the same sites: otherwise the difference is a single hospital's counts.
    digest = RequestHashes(plan=hashlib.sha256(request.question.encode()).hexdigest(), start=f"counts {sheet.identity}")
    terms = MaskingConditions(
        largest=float(FIXED_POINT_ONE),
        counts=True,
        alone=policy.rows_alone,
        identity=site.identity,
        peers=policy.peers,
        cohort=policy.smallest_cohort,
        digest=digest,
        masked=open_masked_round_store(site),
    )
    update = ModelGroups(head=Head(names, numbers[:, :-1].copy(), numbers[:, -1].copy()))
    held_updates.hold_update(
        site, HeldUpdate(SiteMaskingRound(request.run, COUNT_ROUND, site.name, update, terms), None)
    )
    return replace(reply, masked_rows=names)


def _make_masked_row(site: Site, sheet: CountSheet, table: str, word: str | None) -> NDArray[np.float32]:
    """Return the counts of one table and class, ``(MASKED_ROW_LENGTH,)``; a hidden value gives zeros and then a 1.

    Args:
        word: The site's class name; empty for a table without classes, None for a class with several names.
    """
    row = np.zeros(MASKED_ROW_LENGTH, np.float32)
    states = list_states(table)
    width = count_numbers_of_value(table)
    for index, value in enumerate(list_row_values(table)):
        line = [sheet.cells.get((table, word, state, value)) if word is not None else None for state in states]
        start = index * width
        if None in line:
            row[start + width - 1] = 1
            continue
        numbers = [number for numbers_of_state in line if numbers_of_state for number in numbers_of_state]
        row[start : start + width - 1] = [round_count_down(number, site.policy) for number in numbers]
    return row
