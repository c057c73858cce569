"""Secure aggregation, every order of messages: in a small model no coordinator opens less than a cohort's sum.

The model has the site's own rules (:class:`MaskedRound`, :func:`compute_share_threshold`) and perfect cryptography: a
secret is known with as many shares of one attempt as the threshold says, and not at all with fewer. The coordinator
relays each site's statement as it was signed, and otherwise tells each site anything, in two attempts at the same
round.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest

from strategies.privacy.secure_aggregation.crypto import SecretsError
from strategies.privacy.secure_aggregation.masked_rounds import MaskedRound, count_needed_survivors
from strategies.privacy.secure_aggregation.vectors import compute_share_threshold

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
    found = chain.from_iterable(combinations(sorted(sites), size) for size in range(least, len(sites) + 1))
    return [frozenset(one) for one in found]


def attempts_of(site: str, sites: Sites, cohort: int, done: MaskedRound) -> Iterator[tuple[Attempt, MaskedRound]]:
    """All that a site can be brought to do in one attempt, and what it then remembers."""
    yield Attempt(), done
    for asked in subsets(sites, 2):
        members = frozenset(done.members) or asked
        least = count_needed_survivors(len(members), cohort)
        for took_part in subsets(members, least):
            try:
                begun = done.masking(took_part)
            except SecretsError:
                continue
            if site in asked & took_part:
                yield Attempt(members, took_part), begun
                yield from _openings(site, Attempt(members, took_part), begun, least)


def _openings(site: str, masked: Attempt, begun: MaskedRound, least: int) -> Iterator[tuple[Attempt, MaskedRound]]:
    for survivors in subsets(masked.took_part, least):
        try:
            after = begun.opening(survivors)
        except SecretsError:
            continue
        if site in survivors:
            yield Attempt(masked.members, masked.took_part, survivors), after


def histories(site: str, sites: Sites, cohort: int, attempts: int) -> set[tuple[Attempt, ...]]:
    """All sequences of attempts at one site."""
    known: set[tuple[tuple[Attempt, ...], MaskedRound]] = {((), MaskedRound())}
    for _ in range(attempts):
        known = {
            ((*history, attempt), after)
            for history, done in known
            for attempt, after in attempts_of(site, sites, cohort, done)
        }
    return {history for history, _ in known}


def opened(attempts: dict[str, Attempt]) -> set[Sites]:
    """The sets of sites whose sum the coordinator can work out of one attempt."""
    masked = {site: one for site, one in attempts.items() if one.took_part}
    if any(masked[other].members != one.members for one in masked.values() for other in one.took_part & set(masked)):
        return set()  # the statements of sites that mask together name the same members, or they refuse
    shown, keys = set[str](), set[str]()
    for site, one in masked.items():
        fellows = [given for given in masked.values() if given.members == one.members and site in given.took_part]
        needed = compute_share_threshold(len(one.members))
        shown |= {site} if sum(site in given.survivors for given in fellows) >= needed else set()
        gone = [given for given in fellows if given.survivors and site not in given.survivors]
        keys |= {site} if len(gone) >= needed else set()
    return {sites for sites in subsets(frozenset(shown), 1) if _cancels(sites, masked, keys)}


def _cancels(sites: Sites, masked: dict[str, Attempt], keys: set[str]) -> bool:
    """Whether no mask between two sites is left on a sum."""
    pairs = [(site, other) for site in sites for other in masked[site].took_part - {site}]
    return all(
        (other in sites and site in masked[other].took_part) or other in keys or site in keys for site, other in pairs
    )


@pytest.mark.parametrize(("count", "cohort", "attempts"), [(3, 2, 2), (3, 3, 2), (4, 3, 1)])
def test_no_order_of_messages_opens_one_update_nor_two_sums_that_differ_by_some(
    count: int, cohort: int, attempts: int
) -> None:
    sites = frozenset("abcd"[:count])
    everything = [sorted(histories(site, sites, cohort, attempts), key=repr) for site in sorted(sites)]
    found = 0
    for choice in product(*everything):
        sums = set[Sites]()
        for attempt in range(attempts):
            sums |= opened({site: history[attempt] for site, history in zip(sorted(sites), choice, strict=True)})
        found += len(sums)
        assert all(len(one) >= cohort for one in sums), choice
        assert all(not one & other for one, other in combinations(sums, 2)), choice
    assert found  # the coordinator of the model does open sums
