"""Work in proportion: counts of steps, not seconds, with 10,000 sites, 1,000 classes, 5,000 rounds, a million rows."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from polyclinic.common.contract import LabelContract, LabelDeclaration, merge_label_declarations
from polyclinic.common.models.network import build_network
from polyclinic.common.models.parts import find_tensor_slots, list_parts, set_training_flag
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
from polyclinic.data.base.image_set import DIGEST_BLOCKS, ImageSet, compute_picture_digest
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import RoundFileLine, RunSummary
from polyclinic.strategies.engine.exchange import MAX_MISSING_REPORTED_AT_ONCE, send_and_receive
from polyclinic.strategies.local.method_faults import find_contract_faults
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import federation
from tests.strategies.scripted import Clock
from tests.studies.made_runs import summary

SITES, CLASSES, ROUNDS, ROWS = 10_000, 1_000, 5_000, 1_000_000


def call_counts(work: Callable[[], object], noted: Callable[[FrameType], object]) -> Counter[object]:
    """How often each value came that ``noted`` returns at a call of a Python function; None is left out."""
    counts = Counter[object]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (value := noted(frame)) is not None:
            counts[value] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


def count_calls(work: Callable[[], object]) -> int:
    """Number of calls of Python and C functions."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


# ---------------------------------------------------------------------- sites


class OneByOne:
    """A Grid that returns one reply at a time, as that of a simulation does; it counts the ids that it looks at."""

    def __init__(self) -> None:
        self.pending: dict[str, Message] = {}
        self.looks = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            identifier = str(len(self.pending))
            self.pending[identifier] = replace_metadata(message, message_id=identifier)
        return list(self.pending)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        for identifier in message_ids:
            self.looks += 1
            if identifier in self.pending:
                return [Message(RecordDict(), reply_to=self.pending.pop(identifier))]
        return []


def test_the_missing_sites_of_a_large_round_are_not_listed_at_each_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.strategies.engine.exchange.time", Clock())
    monkeypatch.setattr(Clock, "monotonic", lambda clock: clock.now)
    grid: Any = OneByOne()
    messages = [
        make_request(RecordDict({"do": ConfigRecord({})}), node, "train", group_id="1", ttl=60.0)
        for node in range(2, SITES + 2)
    ]
    listed = list[int]()
    replies = list(
        send_and_receive(grid, messages, lambda silent, lost: listed.append(len(silent)), deadline_s=60.0, enough=SITES)
    )
    assert len(replies) == SITES
    assert grid.looks == SITES
    few = MAX_MISSING_REPORTED_AT_ONCE
    assert listed == [SITES, *range(few, 0, -1)]  # all before the first reply, then each change among the last hundred


# ---------------------------------------------------------------------- classes


def contract_of(classes: int) -> LabelContract:
    names = tuple(f"class {number:04}" for number in range(classes))
    return LabelContract(names, MappingProxyType({"north": names, "south": names[1:], "west": names[:-1]}))


@pytest.mark.parametrize("method", ["fedavg", "surgical"])
def test_a_method_looks_at_each_class_of_a_contract_once(method: str) -> None:
    site_method = STRATEGIES[method]({}).site

    def calls(classes: int) -> int:
        return count_calls(lambda: find_contract_faults(site_method, contract_of(classes)))

    assert calls(CLASSES) < 2.5 * calls(CLASSES // 2)


def test_a_contract_has_its_sites_by_class_from_one_pass() -> None:
    contract = contract_of(CLASSES)
    assert contract.annotating_sites("class 0000") == ("north", "west")
    assert contract.annotating_sites("nobody's") == ()
    assert len(contract.shared_classes) == CLASSES - 2
    first = contract.shared_classes
    assert count_calls(lambda: [contract.shared_classes for _ in range(CLASSES)]) < 10
    assert contract.shared_classes is first
    assert contract.annotated_class_mask("south").sum() == CLASSES - 1


def test_declarations_of_many_classes_are_merged_class_by_class() -> None:
    def calls(classes: int) -> int:
        names = tuple(f"class {number:04}" for number in range(classes))
        declarations = [LabelDeclaration(site, names) for site in ("north", "south")]
        return count_calls(lambda: merge_label_declarations(declarations, names))

    assert calls(CLASSES) < 2.5 * calls(CLASSES // 2)


# ---------------------------------------------------------------------- rounds


def test_the_rounds_of_all_sites_are_counted_once_for_a_report() -> None:
    sites = tuple(f"site-{number:02}" for number in range(50))
    lines = tuple(RoundFileLine(round=number, sites=sites) for number in range(1, ROUNDS + 1))
    content = summary("surgical", {"a": 0.9, "b": 0.8}) | {
        "sites": {site: {"classes": ["a", "b"]} for site in sites},
        "rounds": ROUNDS,
    }
    run = RunFolderContent(Path("run"), RunSummary.model_validate(content), lines)
    rounds = list[int]()
    counts = call_counts(
        lambda: rounds.extend(run.round_count_by_site[site] for site in sites), lambda frame: frame.f_code.co_qualname
    )
    assert rounds == [ROUNDS] * len(sites)
    assert ROUNDS <= counts["Counter.update"] <= ROUNDS + 1


# ---------------------------------------------------------------------- rows


class CountingPool(ThreadPoolExecutor):
    """Counts its tasks."""

    tasks = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        CountingPool.tasks += 1
        return super().submit(*arguments, **options)


def images(count: int) -> ImageSet:
    """Pictures of two pixels, each other than its neighbours."""
    numbers = np.arange(count) % 65_521
    stored = np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8)[:, None, :]  # (count, 1, 2)
    texts = np.full(count, "", dtype=np.str_)
    return ImageSet(stored, np.zeros((count, 1), np.float32), ("a",), texts, texts)


def test_a_million_pictures_are_hashed_by_a_handful_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.data.base.image_set.ThreadPoolExecutor", CountingPool)
    monkeypatch.setattr(CountingPool, "tasks", 0)
    of_all = images(ROWS).picture_digests
    assert CountingPool.tasks == DIGEST_BLOCKS
    assert of_all.shape == (ROWS,)
    for row in (0, 1, 12_345, ROWS - 1):
        assert of_all[row] == compute_picture_digest(images(ROWS).stored[row])


@pytest.mark.parametrize("count", [1, 2, DIGEST_BLOCKS + 1])
def test_few_pictures_have_the_digests_of_each(count: int) -> None:
    few = images(count)
    assert few.picture_digests.tolist() == [compute_picture_digest(few.stored[row]) for row in range(count)]


def test_a_long_text_is_looked_at_once_for_each_different_character() -> None:
    text = "2 µm · größer als " * 50_000
    assert count_calls(lambda: is_plain_text(text)) < 200
    assert not is_plain_text(text + "\u202e")


# ---------------------------------------------------------------------- requests of a site

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, task="multi_label")


def test_sites_that_evaluate_one_model_write_its_trunk_once_and_hash_nothing(tmp_path: Path) -> None:
    def noted(frame: FrameType) -> object:
        name = frame.f_code.co_name
        if name == "hash_evaluated_model":
            return name
        if name == "write_model_state" and frame.f_back and frame.f_back.f_code.co_name == "prepare_local_task":
            request = frame.f_back.f_locals["request"]
            return type(request).__name__, frame.f_locals["trunk"] is not None
        return None

    counts = call_counts(lambda: federation(tmp_path, "run.rounds=1", "partition.sites=4"), noted)
    # The last validation and the test: each message's trunk is written for the first of four sites.
    assert counts == {("TrainRequest", True): 4, ("EvaluateRequest", True): 2, ("EvaluateRequest", False): 6}


def test_a_test_scores_each_part_of_the_data_once(tmp_path: Path) -> None:
    def noted(frame: FrameType) -> object:
        back = frame.f_back
        while frame.f_code.co_name == "compute_logits" and back is not None:
            if back.f_code.co_name == "evaluate_received_model":
                return back.f_locals["request"].test
            back = back.f_back
        return None

    counts = call_counts(lambda: federation(tmp_path, "run.rounds=1", "partition.sites=3"), noted)
    assert counts == {False: 3, True: 6}  # the last validation; of the test, validation and test images


def test_a_network_is_walked_through_once() -> None:
    network = build_network(SPEC, ("a", "b"), 0)
    parts = list_parts(network)
    assert list_parts(network) is parts
    assert [*parts.modules] == [*network.modules()][1:]
    assert [id(owner[name]) for owner, name in parts.parameters] == [id(each) for each in network.parameters()]
    set_training_flag(network, training=False)
    assert not any(module.training for module in network.modules())
    set_training_flag(network, training=True)
    assert all(module.training for module in network.modules())


def test_a_parameter_that_is_replaced_is_found_where_the_old_one_was() -> None:
    network = build_network(SPEC, ("a", "b"), 0)
    list_parts(network)
    network.head.bias = torch.nn.Parameter(torch.ones(2))
    assert any(owner[name] is network.head.bias for owner, name in list_parts(network).parameters)
    owner, name = find_tensor_slots(network)["head.bias"]
    assert owner[name] is network.head.bias


def test_lists_of_a_network_do_not_keep_it_in_memory() -> None:
    network = build_network(SPEC, ("a", "b"), 0)
    list_parts(network)
    gone = ref(network)
    del network
    gc.collect()
    assert gone() is None
