"""A hospital's program that answers the roll call with other words."""

from tests.network.real import Site

PROGRAM = """
import sys
from dataclasses import replace
import polyclinic.client.app
honest = polyclinic.client.app.answer_roll_call
def lying(site, call):
    answer = honest(site, call)
    names = answer.class_names
    return replace(answer, {changes})
polyclinic.client.app.answer_roll_call = lying
from polyclinic.client.cli import main
main(sys.argv[1:])
"""


def connect_lying(site: Site, changes: str) -> None:
    """Start a site that lies, and wait until it is connected.

    Args:
        changes: Fields of its answer as Python's keyword arguments; ``names`` are its classes.
    """
    site.start_by("-c", PROGRAM.format(changes=changes), "start", site.folder).says("connected to ")
