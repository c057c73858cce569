"""Hospitals with made-up patients for tests of counts, and a reader who attacks their answers by integer programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from polyclinic.client.app import make_client_app
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.counts import CountQuestion
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.counts import CountReply, CountRequest
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
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
        one = random.choice(len(class_names), everybody, p=shares / shares.sum())
        shown = np.eye(len(class_names), dtype=bool)[one]
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
        states = {
            name: words.get(float(images.labels[row, at]), "not annotated")
            for at, name in enumerate(images.class_names)
        }
        add_unit(states, value_of(row), 1)
    for name, row in first.items():
        labels = images.labels[rows[name]]
        states = {}
        for at, of_class in enumerate(images.class_names):
            column = labels[:, at]
            states[of_class] = (
                "present" if (column == 1).any() else "absent" if (column == 0).any() else "not annotated"
            )
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
            # Combinations are of the classes that the hospital tells.
            visible = {key[1] for key in self.told if key[0] == "class"}
            fits = []
            for states in self.states:
                own = {name for name, one in zip(self.class_names, states, strict=True) if one == "present"}
                fits.append(own & visible == shown)
            return rows[np.array(fits)]
        if name:
            place = self.class_names.index(name)
            rows = rows[np.array([row[place] == state for row in self.states])]
        attribute = table.removeprefix("class_by_")
        if attribute == "class":
            return rows
        values = self.values[attribute]
        return self.starts[attribute] + rows * len(values) + values.index(value)

    def find_range(self, cell: Cell, *, whole: bool = True) -> tuple[float, float]:
        """The smallest and the largest number that a count can have."""
        return find_range_of_sum(self.rows, self.size, self.unknowns(cell), whole=whole)


Row = tuple[np.ndarray, np.ndarray, float, float]
"""Unknowns, their factors, and the range of the sum."""


def find_range_of_sum(rows: Sequence[Row], size: int, at: np.ndarray, *, whole: bool = True) -> tuple[float, float]:
    """The smallest and the largest sum of some unknowns, by an integer program (or a linear one)."""
    lengths = [len(places) for places, *_ in rows]
    places = np.repeat(np.arange(len(rows)), lengths), np.concatenate([row[0] for row in rows])
    matrix = csr_matrix((np.concatenate([row[1] for row in rows]), places), shape=(len(rows), size))
    known = LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows])
    ends = list[float]()
    for sign in (1.0, -1.0):
        objective = np.zeros(size)
        objective[at] = sign
        kind = np.full(size, int(whole), np.int64)
        found = milp(objective, integrality=kind, bounds=Bounds(0, 10_000), constraints=[known])
        assert found.status == 0, found.message
        ends.append(sign * found.fun)
    return ends[0], ends[1]


@dataclass
class ReaderOfSums:
    """A reader of sums over hospitals, who knows which hospitals hide which counts: more than the sums say.

    Attributes:
        readers: Hospital -> what is known of it alone: nothing is told, and which hidden numbers are small.
        sums: Count -> the hospitals in the sum, and the sum.
    """

    readers: Mapping[str, Reader]
    sums: Mapping[Cell, tuple[Sequence[str], int]]

    def __post_init__(self) -> None:
        self.starts, self.size, self.rows = dict[str, int](), 0, list[Row]()
        for name, reader in self.readers.items():
            self.starts[name] = self.size
            self.rows += [(at + self.size, *rest) for at, *rest in reader.rows]
            self.size += reader.size
        for cell, (names, number) in self.sums.items():
            at = np.concatenate([self.starts[name] + self.readers[name].unknowns(cell) for name in names])
            self.rows.append((at, np.ones(len(at)), number, number))

    def find_range(self, name: str, cell: Cell) -> tuple[float, float]:
        """The smallest and the largest number that one hospital's count can have."""
        at = self.starts[name] + self.readers[name].unknowns(cell)
        return find_range_of_sum(self.rows, self.size, at)


# ---------------------------------------------------------------------- several hospitals


class HospitalsGrid(Grid):
    """A Flower ``Grid`` whose sites are hospitals' apps in this process.

    Attributes:
        apps: Name -> the app; the first one is node 2.
    """

    def __init__(self, apps: Mapping[str, ClientApp]) -> None:
        self.apps = dict(apps)
        self._nodes = {name: node for node, name in enumerate(sorted(apps), 2)}
        self._pushed = dict[str, Message]()

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [self._nodes[name] for name in self.apps]

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        names = []
        for message in messages:
            names.append(str(len(self._pushed)))
            self._pushed[names[-1]] = replace_metadata(message, message_id=names[-1], run_id=1, src_node_id=1)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        by_node = {node: self.apps[name] for name, node in self._nodes.items() if name in self.apps}
        replies = []
        for name in message_ids:
            message = self._pushed[name]
            node = message.metadata.dst_node_id
            try:
                replies.append(by_node[node](message, Context(1, node, {}, RecordDict(), {})))
            except (ValueError, BadInput) as error:
                replies.append(Message(Error(2, str(error)), reply_to=message))
        return replies
