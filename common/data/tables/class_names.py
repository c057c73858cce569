"""What can be wrong with class names that somebody wrote down."""

from collections.abc import Sequence

from common.errors import Fault, did_you_mean, quoted


def unknown_faults(where: str, names: Sequence[str], class_names: Sequence[str]) -> list[Fault]:
    return [
        Fault(
            f"{where}[{place}]",
            f'"{name}" is not a class of the data, whose classes are {quoted(class_names)}.',
            did_you_mean(name, class_names),
        )
        for place, name in enumerate(names)
        if name not in class_names
    ]


def repeated_faults(where: str, names: Sequence[str]) -> list[Fault]:
    twice = sorted({name for name in names if names.count(name) > 1})
    return [Fault(where, f"{quoted(twice)} stands there more than once.")] if twice else []
