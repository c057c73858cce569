"""The rules that bound what a plan may cost a hospital; each is looked up by the key of the policy that it holds.

Cheap rules come first, and none builds the network: see :mod:`client.gate.plan_costs`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from client.gate.plan_costs import disk_bytes, footprint, machine_memory, memory_bytes
from client.gate.requested_work import RequestedWork
from client.site.policy import Policy
from common.system.formatting import size

GB = 10**9
PRIVACY: Mapping[str, tuple[float, float]] = {
    "epsilon": (0.001, 1000.0),
    "delta": (1e-12, 0.1),
    "noise_multiplier": (0.001, 1e6),
}
"""Smallest and largest of each, in a plan with privacy; a noise multiplier of 0 stands for no noise."""


def _rounds(policy: Policy, asked: RequestedWork) -> str:
    rounds, most = max(asked.plan.run.rounds, asked.round), policy.maximum_rounds
    return f"it is {most}, and the run has {rounds} rounds" if most is not None and rounds > most else ""


def _rounds_announced(policy: Policy, asked: RequestedWork) -> str:
    rounds = asked.plan.run.rounds
    return "" if 0 <= asked.round <= rounds else f"the run has {rounds} rounds, and this is round {asked.round}"


def epochs_of(asked: RequestedWork) -> int:
    """Local epochs in one round, the most that a method can train where it trains until its loss settles."""
    settling = asked.method.settling
    return asked.plan.training.epochs if settling is None else settling.cap


def _epochs(policy: Policy, asked: RequestedWork) -> str:
    warm_up = asked.method.warm_up.epochs
    return _beyond(max(epochs_of(asked), warm_up), policy.maximum_epochs, "epochs a round")


def _total_epochs(policy: Policy, asked: RequestedWork) -> str:
    total = asked.plan.run.rounds * epochs_of(asked) + asked.method.warm_up.epochs
    if asked.plan.evaluation.alone:
        total *= 3  # the same again alone, and at most the same to fine-tune
    return _beyond(total, policy.maximum_total_epochs, "epochs in all")


def _batch_size(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.plan.training.batch_size, policy.maximum_batch_size, "images a batch")


def _image_size(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.plan.model.image_size, policy.maximum_image_size, "pixels a side")


def _threads(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.plan.training.threads, policy.maximum_threads, "threads")


def _classes(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.rows, policy.maximum_classes, "head rows")


def _method_number(policy: Policy, asked: RequestedWork) -> str:
    largest = max(_whole_numbers(asked.plan.method), default=0)
    return _beyond(largest, policy.maximum_method_number, "in [method] as one of its numbers")


def _tests(policy: Policy, asked: RequestedWork) -> str:
    tests = asked.plan.evaluation.test_each_round
    return "it is false, and the plan tests every round" if tests and not policy.test_each_round else ""


def _privacy(policy: Policy, asked: RequestedWork) -> str:
    """Figures of privacy for which the accountants find noise in seconds; beyond, some search for ever."""
    section = asked.plan.privacy
    if section.level == "none":
        return ""
    figures = {name: getattr(section, name) for name in PRIVACY}
    return next(
        (
            f"{name} is {value:g}; it must be from {PRIVACY[name][0]:g} to {PRIVACY[name][1]:g}"
            for name, value in figures.items()
            if value and not PRIVACY[name][0] <= value <= PRIVACY[name][1]
        ),
        "",
    )


def _parameters(policy: Policy, asked: RequestedWork) -> str:
    most = policy.maximum_parameters
    return "" if most is None else _beyond(footprint(asked.plan.model, asked.rows).parameters, most, "numbers a model")


def _memory(policy: Policy, asked: RequestedWork) -> str:
    most = policy.maximum_memory_gb
    if most is None:
        return ""
    room = machine_memory(asked.device) if most == "machine" else int(most * GB)
    return _larger(memory_bytes(asked.plan, asked.rows, asked.images, asked.device, asked.gpus), room, "memory")


def _disk(policy: Policy, asked: RequestedWork) -> str:
    most = policy.maximum_disk_gb
    return "" if most is None else _larger(disk_bytes(asked.plan, asked.method, asked.rows), int(most * GB), "disk")


LIMIT_RULES: Mapping[str, Callable[[Policy, RequestedWork], str]] = {
    "policy.maximum_rounds": _rounds,
    "plan.rounds": _rounds_announced,
    "policy.maximum_epochs": _epochs,
    "policy.maximum_total_epochs": _total_epochs,
    "policy.maximum_batch_size": _batch_size,
    "policy.maximum_image_size": _image_size,
    "policy.maximum_threads": _threads,
    "policy.maximum_classes": _classes,
    "policy.maximum_method_number": _method_number,
    "policy.test_each_round": _tests,
    "plan.privacy": _privacy,
    "policy.maximum_parameters": _parameters,
    "policy.maximum_memory_gb": _memory,
    "policy.maximum_disk_gb": _disk,
}


def _beyond(asked: int, most: int | None, what: str) -> str:
    return f"it is {most:,}, and the plan has {asked:,} {what}" if most is not None and asked > most else ""


def _larger(needed: int, room: int, what: str) -> str:
    return f"it is {size(room)}, and this plan takes {size(needed)} of {what} or more" if needed > room else ""


def _whole_numbers(tree: Any) -> Iterator[int]:
    """All whole numbers of a table, those of tables and lists in it too."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _whole_numbers(value)
    elif isinstance(tree, int):
        yield tree
