"""Hospitals with made-up patients for tests of counts, and a reader who attacks what they tell by an integer program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from polyclinic.client.app import make_client_app
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.counts import CountQuestion
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.counts import CountReply, CountRequest
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.data.base.attributes import ImageAttributes
from polyclinic.data.base.image_set import ImageSet

CLASSES = ("Effusion", "Mass", "Nodule")
ATTRIBUTES = ("sex", "age", "year", "device")
Cell = tuple[str, str, str, str]


def made_images(
    seed: int,
    count: int = 400,
    class_names: tuple[str, ...] = CLASSES,
    *,
    one_class_each: bool = False,
    named: tuple[str, ...] = ATTRIBUTES,
) -> ImageSet:
    """Images of patients with sex, age, year and device; some classes are rare, some labels missing."""
    random = np.random.default_rng(seed)
    patients = random.integers(0, max(count // 2, 1), count)
    everybody = patients.max() + 1
    shares = random.uniform(0.01, 0.5, len(class_names))
    shown = random.random((everybody, len(class_names))) < shares
    if one_class_each:
        shown = np.eye(len(class_names), dtype=bool)[random.choice(len(class_names), everybody, p=shares / shares.sum())]
    labels = shown[patients].astype(np.float32)
    if not one_class_each:
        labels[random.random(labels.shape) < 0.02] = np.nan
    sex = np.array(["female", "male", ""])[random.choice(3, everybody, p=[0.55, 0.44, 0.01])]
    age = random.normal(55, 18, everybody).clip(0, 99).astype(np.int16)
    attributes = ImageAttributes(
        sex[patients],
        age[patients],
        random.choice([2018, 2019, 2020, 2021], count, p=[0.4, 0.3, 0.28, 0.02]).astype(np.int16),
        np.array(["A", "B", "C"])[random.choice(3, count, p=[0.6, 0.38, 0.02])],
        named,
    )
    return ImageSet(
        stored=random.integers(0, 255, (count, 4, 4), dtype=np.uint8),
        labels=labels,
        class_names=class_names,
        patients=np.char.add("P", patients.astype(str)),
        sources=np.full(count, ""),
        attributes=attributes,
    )


def counting_site(folder: Path, images: ImageSet, name: str = "north", **policy: Any) -> Site:
    """A hospital that has these images in its three parts."""
    third = len(images) // 3
    parts = [images.select_rows(np.arange(start, end)) for start, end in ((0, third), (third, 2 * third))]
    rest = images.select_rows(np.arange(2 * third, len(images)))
    declaration = LabelDeclaration(name, images.class_names)
    return Site(declaration, *parts, rest, folder, durable=False, policy=SitePolicy(**policy))


def asked(site: Site, question: CountQuestion | None = None, run: str = "count-1") -> CountReply:
    """The answer of a hospital's whole app to a question."""
    request = CountRequest(run, (question or CountQuestion()).model_dump_json())
    message = make_request(encode_record(request), 2, "query.count")
    reply = make_client_app(lambda context: site)(message, Context(1, 2, {}, RecordDict(), {}))
    assert not reply.has_error(), reply.error
    return decode_record(reply.content, CountReply)


def random_question(random: np.random.Generator, tables: Sequence[str], classes: Sequence[str]) -> CountQuestion:
    """A question for some tables and some classes."""
    some = [table for table in tables if random.random() < 0.4] or [tables[0]]
    names = [name for name in classes if random.random() < 0.6] or [classes[0]]
    return CountQuestion(tables=tuple(some), classes=tuple(names))


def true_cells(images: ImageSet) -> dict[Cell, tuple[int, int]]:
    """Every count of the menu but combinations and grey values, worked out patient by patient."""
    order = sorted(range(len(images)), key=lambda row: (images.attributes.year[row], row))
    first = dict[str, int]()
    for row in order:
        first.setdefault(str(images.patients[row]), row)
    rows = {name: np.flatnonzero(images.patients == name) for name in first}
    cells = dict[Cell, list[int]]()

    def add(key: Cell, place: int) -> None:
        cells.setdefault(key, [0, 0])[place] += 1

    def add_unit(states: Mapping[str, str], values: Mapping[str, str], place: int) -> None:
        for name, state in states.items():
            add(("class", name, state, ""), place)
            for attribute, value in values.items():
                add((f"class_by_{attribute}", name, state, value), place)
        for attribute, value in values.items():
            add((attribute, "", "all", value), place)

    def value_of(row: int) -> dict[str, str]:
        age = int(images.attributes.age[row])
        return {
            "sex": str(images.attributes.sex[row]) or "not stated",
            "age": "90+" if age >= 90 else f"{age // 10 * 10}-{age // 10 * 10 + 9}",
            "year": str(images.attributes.year[row]),
            "device": str(images.attributes.device[row]),
        }

    words = {1.0: "present", 0.0: "absent"}
    for row in range(len(images)):
        states = {name: words.get(float(images.labels[row, at]), "not annotated") for at, name in enumerate(images.class_names)}
        add_unit(states, value_of(row), 1)
    for name, row in first.items():
        labels = images.labels[rows[name]]
        states = {}
        for at, of_class in enumerate(images.class_names):
            column = labels[:, at]
            states[of_class] = "present" if (column == 1).any() else "absent" if (column == 0).any() else "not annotated"
        stated = [str(sex) for sex in images.attributes.sex[rows[name]] if sex]
        add_unit(states, value_of(row) | {"sex": stated[0] if stated else "not stated"}, 0)
    return {key: (patients, pictures) for key, (patients, pictures) in cells.items()}


# ---------------------------------------------------------------------- the attack


@dataclass
class Reader:
    """A reader with all answers of a hospital, who knows the rules, and solves for what is hidden.

    The unknown population: for each combination of the classes' states a number of units, and for each attribute how
    these are distributed over its values.

    Attributes:
        told: Count -> the number that was told.
        own_number: Hidden count of patients -> whether it is below ``smallest``: more than a reader can know.
        slack: A told number may be off by so much (noise).
    """

    class_names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    told: Mapping[Cell, int]
    units: int | None
    own_number: Mapping[Cell, bool] = field(default_factory=dict)
    smallest: int = 10
    slack: float = 0.0

    def __post_init__(self) -> None:
        self.states = list(product(("present", "absent", "not annotated"), repeat=len(self.class_names)))
        blocks = {"": 1, **{name: len(values) for name, values in self.values.items()}}
        self.starts, place = {}, 0
        for name, width in blocks.items():
            self.starts[name], place = place, place + width * len(self.states)
        self.size, self.rows = place, list[tuple[np.ndarray, np.ndarray, float, float]]()
        for name, values in self.values.items():
            for row in range(len(self.states)):
                at = self.starts[name] + row * len(values) + np.arange(len(values))
                self.know(np.append(at, row), 0, 0, np.append(np.ones(len(values)), -1.0))
        if self.units is not None:
            self.know(np.arange(len(self.states)), self.units, self.units)
        for cell, number in self.told.items():
            self.know(self.unknowns(cell), number - self.slack, number + self.slack)
        for cell, is_small in self.own_number.items():
            low, high = (0, self.smallest - 1) if is_small else (self.smallest, np.inf)
            self.know(self.unknowns(cell), low, high)

    def know(self, at: np.ndarray, low: float, high: float, factors: np.ndarray | None = None) -> None:
        self.rows.append((at, np.ones(len(at)) if factors is None else factors, low, high))

    def unknowns(self, cell: Cell) -> np.ndarray:
        table, name, state, value = cell
        rows = np.arange(len(self.states))
        if table == "combinations":
            shown = set(value.split(" + ")) - {"no class"}
            fits = [{n for n, s in zip(self.class_names, row, strict=True) if s == "present"} == shown for row in self.states]
            return rows[np.array(fits)]
        if name:
            place = self.class_names.index(name)
            rows = rows[np.array([row[place] == state for row in self.states])]
        attribute = table.removeprefix("class_by_")
        if attribute == "class":
            return rows
        values = self.values[attribute]
        return self.starts[attribute] + rows * len(values) + values.index(value)

    def find_range(self, cell: Cell, whole: bool = True) -> tuple[float, float]:
        """The smallest and the largest number that a count can have."""
        at = self.unknowns(cell)
        lengths = [len(places) for places, *_ in self.rows]
        matrix = csr_matrix(
            (
                np.concatenate([factors for _, factors, _, _ in self.rows]),
                (np.repeat(np.arange(len(self.rows)), lengths), np.concatenate([places for places, *_ in self.rows])),
            ),
            shape=(len(self.rows), self.size),
        )
        known = LinearConstraint(matrix, [row[2] for row in self.rows], [row[3] for row in self.rows])
        ends = list[float]()
        for sign in (1.0, -1.0):
            objective = np.zeros(self.size)
            objective[at] = sign
            bounds = Bounds(0, 10_000)
            kind = np.ones(self.size, np.int64) if whole else np.zeros(self.size, np.int64)
            found = milp(objective, integrality=kind, bounds=bounds, constraints=[known])
            assert found.status == 0, found.message
            ends.append(sign * found.fun)
        return ends[0], ends[1]
