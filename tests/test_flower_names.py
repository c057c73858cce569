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
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")
CRYPTO = "flwr.common.secure_aggregation.crypto."
NAMES = {
    **dict.fromkeys(
        (
            "flwr.app.message.array: FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",
            "flwr.app.message.arraychunk: ArrayChunk",
            "flwr.supercore.inflatable.inflatable_object: no_object_id_recompute",
            "flwr.supercore.inflatable.inflatable_utils: inflate_object_from_contents",
            "flwr.supercore.task_identity: TaskIdentity",
        ),
        "common/wire/flower_objects.py",
    ),
    **dict.fromkeys(
        (
            f"{CRYPTO}shamir: combine_shares",
            f"{CRYPTO}shamir: create_shares",
            f"{CRYPTO}symmetric_encryption: decrypt",
            f"{CRYPTO}symmetric_encryption: encrypt",
            f"{CRYPTO}symmetric_encryption: generate_shared_key",
        ),
        "strategies/privacy/secure_aggregation/crypto.py",
    ),
}
"""Private names, and the one file that has each."""
UNDERSCORED = {"_chunks", "_message_id", "_src_node_id"}
"""Attributes of Flower's objects, in ``common/wire/flower_objects.py`` only."""
MOST = 15
PATCHED = re.compile(r"vars\(importlib.import_module\('(flwr[\w.]*)'\)\)")
FLOWER = f"Flower {version('flwr')} is not what we were written for:"


def used(path: Path) -> Iterator[str]:
    """Module and name of everything that a file takes from Flower's private modules."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            if node.module not in PUBLIC:
                yield from (f"{node.module}: {alias.name}" for alias in node.names)
        elif isinstance(node, ast.Subscript) and (put := PATCHED.match(ast.unparse(node))):
            yield f"{put[1]}: {ast.literal_eval(node.slice)}"


def files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def test_at_most_fifteen_private_names_each_in_one_file() -> None:
    found = {(name, str(path.relative_to(ROOT))) for path in files() for name in used(path)}
    assert found == set(NAMES.items())
    assert len(NAMES) + len(UNDERSCORED) <= MOST


def test_flowers_fedavg_lets_its_check_of_replies_be_left_out() -> None:
    """``polyclinic.flower`` checks each reply itself: Flower's own check ends the run and names no node."""
    from flwr.serverapp.strategy import FedAvg

    check = inspect.signature(FedAvg._check_and_log_replies).parameters
    assert list(check) == ["self", "replies", "is_train", "validate"], f"{FLOWER} FedAvg._check_and_log_replies moved"


def test_no_other_file_reaches_into_flowers_objects() -> None:
    reaching = re.compile("|".join(rf'"{name}"' for name in UNDERSCORED))
    found = {str(path.relative_to(ROOT)) for path in files() if reaching.search(path.read_text(encoding="utf-8"))}
    assert found == {"common/wire/flower_objects.py"}


@pytest.mark.parametrize("name", NAMES)
def test_flower_has_the_name_where_we_look_for_it(name: str) -> None:
    module, _, attribute = name.partition(": ")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise AssertionError(f"{FLOWER} {module} is gone ({error}); {NAMES[name]} needs {attribute}") from None
    assert hasattr(found, attribute), f"{FLOWER} {module} has no {attribute}; {NAMES[name]} needs it"


def taken(name: str) -> Any:
    module, _, attribute = name.partition(": ")
    return getattr(importlib.import_module(module), attribute)


PARAMETERS = {
    "no_object_id_recompute": [],
    "inflate_object_from_contents": ["object_id", "object_contents", "keep_object_contents", "objects"],
    "ArrayChunk": ["data"],
    "combine_shares": ["share_list"],
    "create_shares": ["secret", "threshold", "num"],
    "encrypt": ["key", "plaintext"],
    "decrypt": ["key", "ciphertext"],
    "generate_shared_key": ["private_key", "public_key"],
}


@pytest.mark.parametrize("name", [name for name in NAMES if name.partition(": ")[2] in PARAMETERS])
def test_it_takes_what_we_give_it(name: str) -> None:
    parameters = list(inspect.signature(taken(name)).parameters)
    assert parameters == PARAMETERS[name.partition(": ")[2]], f"{FLOWER} {name} takes {parameters}"


def test_message_fills_its_metadata_from_the_identity_that_we_set() -> None:
    from flwr.app import Message, RecordDict

    from common.wire.flower_objects import set_identity, set_message_id, set_source

    set_identity(7, 9)
    message = Message(RecordDict(), 3, "train")
    said = message.metadata
    assert (said.src_node_id, said.run_id) == (7, 9), f"{FLOWER} Message() takes its identity from elsewhere"
    set_message_id(message, "named")
    set_source(message, 5)
    assert (said.message_id, said.src_node_id) == ("named", 5), f"{FLOWER} Metadata keeps its values elsewhere"
    set_identity(1, 1)


def test_flowers_arrays_are_cut_where_we_say() -> None:
    import numpy as np
    from flwr.app import Array

    from common.wire.fleet_protocol import CHUNK_BYTES

    assert taken("flwr.app.message.array: FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE") == CHUNK_BYTES
    array = Array(np.zeros(3, np.float32))
    array.deflate()
    assert "_chunks" in vars(array), f"{FLOWER} Array keeps its chunks elsewhere"
