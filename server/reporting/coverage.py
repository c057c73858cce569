"""Which site annotates which class, arranged for reading."""

from dataclasses import dataclass

from server.runs.reader import RunSummary

TITLES = {
    "shared": "annotated by every site",
    "some": "annotated by some sites",
    "unique": "annotated by one site only",
    "varies": "shared or unique depending on the seed",
}


@dataclass(frozen=True)
class ClassesOfGroup:
    """Classes with the same kind of coverage.

    Attributes:
        kind: A key of ``TITLES``.
        classes: Class names, in the order of the run's classes.
    """

    kind: str
    classes: tuple[str, ...]

    @property
    def title(self) -> str:
        """What the group has in common."""
        return TITLES[self.kind]


def owners(summary: RunSummary, class_name: str) -> tuple[str, ...]:
    """Sites that annotate the class, in the order of the run's sites."""
    return summary.owners.get(class_name, ())


def class_groups(summary: RunSummary) -> list[ClassesOfGroup]:
    """Shared, partly shared and unique classes, empty groups left out; every class stands in exactly one.

    Taken from the test results, as a method that pools all data has one site but is judged on the hospitals' classes.
    """
    shared, unique = summary.test.shared_classes.classes, summary.test.unique_classes.classes
    kinds = {name: "shared" if name in shared else "unique" if name in unique else "some" for name in summary.classes}
    groups = {kind: tuple(name for name in summary.classes if kinds[name] == kind) for kind in TITLES}
    return [ClassesOfGroup(kind, names) for kind, names in groups.items() if names]
