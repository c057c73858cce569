"""Which sites of a sum hide one another where sites annotate different classes.

A coordinator can send a head row by which the training of all sites that annotate its class fails: their change is
zero. By the difference of what is left with and without such rows, it finds the sum over the sites that annotate the
same classes, and no sum of fewer. So a site hides among the sites with the same classes.
"""

from collections.abc import Collection, Mapping

from strategies.privacy.secure_aggregation.signed_keys import Statement


def left_alone(among: Collection[str], statements: Mapping[str, Statement]) -> list[str]:
    """List the sites of a sum that are hidden by fewer sites, themselves included, than they ask for.

    A site that takes the risk hides no other: it may train on fewer classes than it annotates.
    """
    strict = [statements[site] for site in among if not statements[site].unlike]
    alike = {one.site: sum(one.classes == other.classes for other in strict) for one in strict}
    return [one.site for one in strict if alike[one.site] < one.cohort]
