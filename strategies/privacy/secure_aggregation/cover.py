"""Which sites of a sum hide one another where the sites annotate different classes.

A coordinator can send a head row by which the training of all sites that annotate its class fails. What is left in the
sum are the updates of the others: of the sites that train on no such class. For a site to hide among k sites, no matter
which rows are sent, k sites of the sum, itself included, must train on no class that it lacks: a row that spoils their
training then spoils its own.
"""

from collections.abc import Collection, Mapping

from strategies.privacy.secure_aggregation.signed_keys import Statement


def hiding(
    site: str, trained: Collection[str], among: Collection[str], statements: Mapping[str, Statement]
) -> list[str]:
    """List the sites, among some, that hide this one, itself included.

    Args:
        trained: The classes that the site trains on.
    """
    own = set(trained)
    return [one for one in among if one == site or set(statements[one].classes) <= own]


def left_alone(among: Collection[str], statements: Mapping[str, Statement]) -> list[str]:
    """List the sites of a sum that fewer of them hide than they ask for, by what all of them stated."""
    return [
        site
        for site in among
        if not statements[site].unlike
        and len(hiding(site, statements[site].classes, among, statements)) < statements[site].cohort
    ]
