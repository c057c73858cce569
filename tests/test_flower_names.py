"""What we use of Flower beyond its public packages: counted, listed, and each one still what we take it for."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("client", "common", "polyclinic", "server", "strategies", "studies")
FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")
UNDERSCORED = re.compile(r"[\"']_(chunks|message_id|src_node_id|run_id)[\"']")
"""Attributes of Flower's messages and arrays that are its own business."""
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


def test_the_product_uses_no_private_name_of_flower() -> None:
    assert [(name, str(path.relative_to(ROOT))) for path in FILES for name in used(path)] == []
    reaches = [path for path in FILES if UNDERSCORED.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in reaches] == []


def test_flowers_fedavg_lets_its_check_of_replies_be_left_out() -> None:
    """``polyclinic.flower`` checks each reply itself: Flower's own check ends the run and names no node."""
    from flwr.serverapp.strategy import FedAvg

    check = inspect.signature(FedAvg._check_and_log_replies).parameters
    assert list(check) == ["self", "replies", "is_train", "validate"], f"{FLOWER} FedAvg._check_and_log_replies moved"


PUBLIC_NAMES = {
    "flwr.app": "Array ArrayRecord ConfigRecord Context Error Message MessageType Metadata MetricRecord RecordDict",
    "flwr.clientapp": "ClientApp",
    "flwr.serverapp": "Grid",
    "flwr.serverapp.strategy": "FedAvg Result Strategy",
}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_flower_has_the_public_names_that_we_use(module: str) -> None:
    try:
        there = importlib.import_module(module)
    except ImportError as error:
        raise AssertionError(f"{FLOWER} {module} is gone ({error})") from None
    missing = [name for name in PUBLIC_NAMES[module].split() if not hasattr(there, name)]
    assert missing == [], f"{FLOWER} {module} lacks {missing}"


def test_a_message_takes_metadata_of_our_choice() -> None:
    """The keyword is in none of Flower's overloads, but its own serialiser uses it."""
    from flwr.app import Error, RecordDict

    from polyclinic.common.wire.flower_messages import make_message, make_request, read_metadata, replace_metadata

    request = make_request(RecordDict(), 3, "train", group_id="1", ttl=5.0)
    sent = replace_metadata(request, run_id=9, message_id="named", src_node_id=1)
    stated = (sent.metadata.run_id, sent.metadata.message_id, sent.metadata.src_node_id, sent.metadata.dst_node_id)
    assert stated == (9, "named", 1, 3), f"{FLOWER} Message() or Metadata() takes other values"
    refusal = make_message(Error(7, "no"), read_metadata(sent))
    assert (refusal.error.code, refusal.metadata.reply_to_message_id) == (7, "")
