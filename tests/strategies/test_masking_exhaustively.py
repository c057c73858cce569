"""Secure aggregation, every order of messages: in a small model no coordinator opens less than a cohort's sum.

The model has the site's own rules (:class:`MaskedRoundRecord`, :func:`compute_share_threshold`) and perfect
cryptography: a secret is known with as many shares of one attempt as the threshold says, and not at all with fewer.
The coordinator relays each site's statement as it was signed, and otherwise tells each site anything, in two attempts
at the same round.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest

from polyclinic.strategies.privacy.secure_aggregation.crypto import SecretsError
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import MaskedRoundRecord, count_needed_survivors
from polyclinic.strategies.privacy.secure_aggregation.vectors import compute_share_threshold

Sites = frozenset[str]


@dataclass(frozen=True)
class Attempt:
    """What one site did in one attempt.

    Attributes:
        members: Empty where it was not asked.
        took_part: The sites with which it masked, itself among them; empty where it did not.
        survivors: Of whom it gave shares; empty where it gave none.
    """

    members: Sites = frozenset()
    took_part: Sites = frozenset()
    survivors: Sites = frozenset()


def subsets(sites: Sites, least: int) -> list[Sites]:
    chosen = chain.from_iterable(combinations(sorted(sites), size) for size in range(least, len(sites) + 1))
    return [frozenset(names) for names in chosen]


def attempts_of(
    site: str, sites: Sites, cohort: int, done: MaskedRoundRecord
) -> Iterator[tuple[Attempt, MaskedRoundRecord]]:
    """All that a site can be brought to do in one attempt, and what it then remembers."""
    yield Attempt(), done
    for requested in subsets(sites, 2):
        members = frozenset(done.members) or requested
        least = count_needed_survivors(len(members), cohort)
        for took_part in subsets(members, least):
            try:
                begun = done.with_masked_members(took_part)
            except SecretsError:
                continue
            if site in requested & took_part:
                yield Attempt(members, took_part), begun
                yield from _openings(site, Attempt(members, took_part), begun, least)


def _openings(
    site: str, masked: Attempt, begun: MaskedRoundRecord, least: int
) -> Iterator[tuple[Attempt, MaskedRoundRecord]]:
    for survivors in subsets(masked.took_part, least):
        try:
            after = begun.with_unmasked_survivors(survivors)
        except SecretsError:
            continue
        if site in survivors:
            yield Attempt(masked.members, masked.took_part, survivors), after


def histories(site: str, sites: Sites, cohort: int, attempts: int) -> set[tuple[Attempt, ...]]:
    """All sequences of attempts at one site."""
    states: set[tuple[tuple[Attempt, ...], MaskedRoundRecord]] = {((), MaskedRoundRecord())}
    for _ in range(attempts):
        states = {
            ((*history, attempt), after)
            for history, done in states
            for attempt, after in attempts_of(site, sites, cohort, done)
        }
    return {history for history, _ in states}


def opened(attempts: dict[str, Attempt]) -> set[Sites]:
    """The sets of sites whose sum the coordinator can work out of one attempt."""
    masked = {site: attempt for site, attempt in attempts.items() if attempt.took_part}
    if any(
        masked[other].members != attempt.members
        for attempt in masked.values()
        for other in attempt.took_part & set(masked)
    ):
        return set()  # the statements of sites that mask together name the same members, or they refuse
    shown, keys = set[str](), set[str]()
    for site, own in masked.items():
        fellows = [other for other in masked.values() if other.members == own.members and site in other.took_part]
        needed = compute_share_threshold(len(own.members))
        shown |= {site} if sum(site in other.survivors for other in fellows) >= needed else set()
        gone = [other for other in fellows if other.survivors and site not in other.survivors]
        keys |= {site} if len(gone) >= needed else set()
    return {sites for sites in subsets(frozenset(shown), 1) if _cancels(sites, masked, keys)}


def _cancels(sites: Sites, masked: dict[str, Attempt], keys: set[str]) -> bool:
    """Return whether no mask between two sites is left on a sum."""
    pairs = [(site, other) for site in sites for other in masked[site].took_part - {site}]
    return all(
        (other in sites and site in masked[other].took_part) or other in keys or site in keys for site, other in pairs
    )


@pytest.mark.parametrize(
    ("count", "cohort", "attempts"), [pytest.param(3, 2, 2, marks=pytest.mark.long), (3, 3, 2), (4, 3, 1)]
)
def test_no_order_of_messages_opens_less_than_a_cohort(count: int, cohort: int, attempts: int) -> None:
    sites = frozenset("abcd"[:count])
    everything = [sorted(histories(site, sites, cohort, attempts), key=repr) for site in sorted(sites)]
    opened_sums = 0
    for choice in product(*everything):
        sums = set[Sites]()
        for attempt in range(attempts):
            sums |= opened({site: history[attempt] for site, history in zip(sorted(sites), choice, strict=True)})
        opened_sums += len(sums)
        assert all(len(names) >= cohort for names in sums), choice
        assert all(not names & other for names, other in combinations(sums, 2)), choice
    assert opened_sums  # the coordinator of the model does open sums
