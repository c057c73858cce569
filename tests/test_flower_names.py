"""What we use of Flower beyond its public packages: counted, listed, and each one still what we take it for."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("client", "common", "polyclinic", "server", "strategies", "studies")
FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
OBJECTS = "common/wire/flower_objects.py"
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")
NAMES: dict[str, tuple[str, list[str] | None]] = {
    "flwr.app.message.array: FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": (OBJECTS, None),
    "flwr.app.message.arraychunk: ArrayChunk": (OBJECTS, ["data"]),
    "flwr.supercore.inflatable.inflatable_object: no_object_id_recompute": (OBJECTS, []),
    "flwr.supercore.inflatable.inflatable_utils: inflate_object_from_contents": (
        OBJECTS,
        ["object_id", "object_contents", "keep_object_contents", "objects"],
    ),
    "flwr.supercore.task_identity: TaskIdentity": (OBJECTS, None),
}
"""The one file that uses a name, and the parameters with which it calls it."""
UNDERSCORED = {"_chunks", "_message_id", "_src_node_id"}
"""Attributes of Flower's objects, in ``common/wire/flower_objects.py`` only."""
MOST = 8
PATCHED = re.compile(r"vars\(importlib.import_module\('(flwr[\w.]*)'\)\)")
FLOWER = f"Flower {version('flwr')} is not what we were written for:"


def used(path: Path) -> Iterator[str]:
    """Module and name of everything that a file takes from Flower's private modules."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text if "flwr" in text else "")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            if node.module not in PUBLIC:
                yield from (f"{node.module}: {alias.name}" for alias in node.names)
        elif isinstance(node, ast.Subscript) and (put := PATCHED.match(ast.unparse(node))):
            yield f"{put[1]}: {ast.literal_eval(node.slice)}"


def test_at_most_eight_private_names_each_in_one_file() -> None:
    places = {(name, str(path.relative_to(ROOT))) for path in FILES for name in used(path)}
    assert places == {(name, file) for name, (file, _) in NAMES.items()}
    assert len(NAMES) + len(UNDERSCORED) <= MOST
    reaching = re.compile("|".join(rf'"{name}"' for name in UNDERSCORED))
    reaches = [path for path in FILES if reaching.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in reaches] == [OBJECTS]


def test_flowers_fedavg_lets_its_check_of_replies_be_left_out() -> None:
    """``polyclinic.flower`` checks each reply itself: Flower's own check ends the run and names no node."""
    from flwr.serverapp.strategy import FedAvg

    check = inspect.signature(FedAvg._check_and_log_replies).parameters
    assert list(check) == ["self", "replies", "is_train", "validate"], f"{FLOWER} FedAvg._check_and_log_replies moved"


def part_of_flower(name: str) -> Any:
    module, _, attribute = name.partition(": ")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{FLOWER} {name} is gone ({error}); {NAMES[name][0]} needs it") from None


@pytest.mark.parametrize("name", NAMES)
def test_flower_has_the_name_where_we_look_for_it_and_it_takes_what_we_give_it(name: str) -> None:
    part, (_, expected) = part_of_flower(name), NAMES[name]
    parameters = None if expected is None else list(inspect.signature(part).parameters)
    assert parameters == expected, f"{FLOWER} {name} takes {parameters}"


def test_message_fills_its_metadata_from_the_identity_that_we_set() -> None:
    from flwr.app import Message, RecordDict

    from polyclinic.common.wire.flower_objects import set_flower_node_identity, set_message_id, set_message_source

    set_flower_node_identity(7, 9)
    message = Message(RecordDict(), 3, "train")
    metadata = message.metadata
    assert (metadata.src_node_id, metadata.run_id) == (7, 9), f"{FLOWER} Message() takes its identity from elsewhere"
    set_message_id(message, "named")
    set_message_source(message, 5)
    assert (metadata.message_id, metadata.src_node_id) == ("named", 5), f"{FLOWER} Metadata keeps its values elsewhere"
    set_flower_node_identity(1, 1)


def test_flowers_arrays_are_cut_where_we_say() -> None:
    import numpy as np
    from flwr.app import Array

    from polyclinic.common.wire.fleet_protocol import CHUNK_BYTES

    assert part_of_flower("flwr.app.message.array: FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE") == CHUNK_BYTES
    array = Array(np.zeros(3, np.float32))
    array.deflate()
    assert "_chunks" in vars(array), f"{FLOWER} Array keeps its chunks elsewhere"
