"""Which sites of many are asked in one exchange: drawn from the run's seed and the round, and from nothing else.

A run that was killed and goes on asks the same sites, and so does the same run over the network or in simulation.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

FEW = 100
"""Sites that are all asked how good a model is; of more, so many are drawn, or as many as train in a round."""
EVALUATION = 1
"""What the generator of an evaluation is seeded with besides, so that it does not draw the sites of a round."""


def evaluated(asked: int | None, sites_per_round: int) -> int:
    """How many sites are asked how good a model is; 0 stands for all.

    Args:
        asked: What the experiment says; None where it leaves it open. Then all are asked wherever all train.
    """
    if asked is not None:
        return asked
    return max(FEW, sites_per_round) if sites_per_round else 0


def drawn(names: Collection[str], size: int, seed: Sequence[int]) -> list[str]:
    """So many of the names, sorted, each set as likely as any other; all where there are no more, or ``size`` is 0."""
    ordered = sorted(names)
    if not 0 < size < len(ordered):
        return ordered
    return sorted(np.random.default_rng(seed).choice(ordered, size, replace=False).tolist())


def drawn_to_cover(
    annotated: Mapping[str, Collection[str]], size: int, seed: Sequence[int], excluded: Collection[str] = ()
) -> list[str]:
    """Draw so many sites, sorted, that each class is annotated by one of them, where that many can.

    A plain draw that covers the classes stays as it is. Else sites that annotate what it misses come first, of several
    the one that annotates most of it, and the last ones drawn are left out. With at least as many sites as classes each
    class is covered; with fewer, as many as this greedy choice finds.

    Args:
        annotated: Site -> its classes; who is excluded counts in the draw, so that the others' places stay the same.
        size: 1 or more.
    """
    names = sorted(annotated)
    places = np.random.default_rng(seed).permutation(len(names)).tolist()
    classes = {name: frozenset(annotated[name]) for name in names if name not in set(excluded)}
    order, needed = [names[place] for place in places if names[place] in classes], list[str]()
    every = frozenset[str]().union(*classes.values())
    while True:
        chosen = [*needed, *(site for site in order if site not in needed)][:size]
        missing = every.difference(*(classes[site] for site in chosen))
        if not missing or len(needed) == len(chosen):
            return sorted(chosen)
        needed.append(max(order, key=lambda site: len(classes[site] & missing)))
