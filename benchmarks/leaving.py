"""What it costs a round that everything that leaves is checked and written down; nobody trains.

python benchmarks/leaving.py [--models tiny_cnn,resnet18] [--repetitions 30] [--out FILE]

A row a check and model: CPU and wall-clock milliseconds of one site's round (a request and its reply), and of the
coordinator for one site's reply. A new check is a new entry of ``CHECKS``.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict

from polyclinic.client.gate.gate import make_policy_gate
from polyclinic.client.gate.policy_rules import RequestedWork, decide_if_reply_may_leave, decide_on_request
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import ModelStateLayout, make_model_layout, read_model_state
from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import ModelGroups, TrainReply, TrainRequest
from polyclinic.data.base.image_set import ImageSet
from polyclinic.server.runs.audit_log import RunAuditWriter
from polyclinic.strategies.engine.events import ReplyArrival
from polyclinic.strategies.registry import build_site_method

CLASSES = ("a", "b", "c")


@dataclass(frozen=True)
class Round:
    """One site's round, ready to be checked."""

    plan: HospitalPlan
    layout: ModelStateLayout
    request: TrainRequest
    reply: TrainReply
    folder: Path

    def site(self, *, durable: bool) -> Site:
        """A site with a policy that looks at everything."""
        blank = np.zeros((1, 16, 16), np.uint8)
        images = ImageSet(blank, np.zeros((1, 3), np.float32), CLASSES, np.array(["0"]), np.array([""]))
        policy = SitePolicy(methods=("surgical",), maximum_update_norm=1e9)
        declaration = LabelDeclaration("north", CLASSES)
        return Site(declaration, images, images, images, self.folder, policy=policy, durable=durable)


Check = Callable[[Round], Callable[[], object]]


def passage(durable: bool) -> Check:
    """The gate around a handler that has its answer ready: policy, two hashes, two lines of the audit."""

    def prepared(each: Round) -> Callable[[], object]:
        site = each.site(durable=durable)
        options, answer = make_request(encode_record(each.request), 2, "train"), encode_record(each.reply)
        through = make_policy_gate(lambda context: site)
        context = Context(1, 2, {}, RecordDict(), {})
        return lambda: through(options, context, lambda message, context: Message(answer, reply_to=message))

    return prepared


def policy_alone(each: Round) -> Callable[[], object]:
    """The rules, without reading the record back; with a bound on the length, which is measured."""
    policy, options = each.site(durable=False).policy, RequestedWork(each.plan, build_site_method(each.plan), 1)
    return lambda: (decide_on_request(policy, options), decide_if_reply_may_leave(policy, options, each.reply))


def one_hash(each: Round) -> Callable[[], object]:
    """SHA-256 of a reply."""
    content = encode_record(each.reply)
    return lambda: hash_record(content)


def coordinator(keep: bool) -> Check:
    """The coordinator's line for a reply, with its hash; and the reply itself, where updates are kept."""

    def prepared(each: Round) -> Callable[[], object]:
        ledger = RunAuditWriter(each.folder / "run", each.layout, keep=keep, durable=True)
        arrival = ReplyArrival("TrainReply", 1, "north", encode_record(each.reply), "")
        return lambda: ledger.record_reply(arrival)

    return prepared


CHECKS: dict[str, Check] = {
    "site: policy alone, length measured": policy_alone,
    "site: one SHA-256": one_hash,
    "site: gate and audit, as in simulation": passage(durable=False),
    "site: gate and audit, flushed to disk": passage(durable=True),
    "coordinator: a reply's line in the audit": coordinator(keep=False),
    "coordinator: the same, update kept": coordinator(keep=True),
}


def round_of(architecture: str, folder: Path) -> Round:
    """A round of surgical aggregation, with an update that is the model itself."""
    model = {"architecture": architecture, "channels": 3, "image_size": 64}
    method = {"clip_update": 1e9}
    tables = {"run": {"method": "surgical"}, "method": method, "model": model, "training": {}, "augmentation": {}}
    plan = HospitalPlan.model_validate(tables)
    network = build_network(plan.model, CLASSES, 0)
    groups = ModelGroups.from_model(read_model_state(network))
    request = TrainRequest("run", 2, plan.model_dump_json(), "contract", CLASSES, 0, -1, "", groups)
    reply = TrainReply("run", 2, "north", 100, 0.5, 0.5, 0.5, 1.0, groups)
    return Round(plan, make_model_layout(network), request, reply, folder)


def measured(work: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Median CPU and wall-clock milliseconds."""
    cpu, wall = [], []
    for _ in range(repetitions + 1):
        began, on_clock = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - on_clock)
    return statistics.median(cpu[1:]) * 1e3, statistics.median(wall[1:]) * 1e3


def main() -> None:
    """Print one row a model and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny_cnn,resnet18")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print("| model | check | CPU ms | wall ms |\n| --- | --- | --- | --- |")
    rows = []
    for model in arguments.models.split(","):
        for name, check in CHECKS.items():
            with tempfile.TemporaryDirectory() as folder:
                cpu, wall = measured(check(round_of(model, Path(folder))), arguments.repetitions)
                print(f"| `{model}` | {name} | {cpu:.2f} | {wall:.2f} |", flush=True)
                rows.append({"model": model, "check": name, "cpu_ms": cpu, "wall_ms": wall})
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
