"""Checks of an update and of statistics before they count: exactly what was asked for, in shape, finite."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Arrays, Groups


def fault_in(update: Groups, sent: Groups) -> str:
    """Say why an update cannot count, or return an empty string.

    Args:
        update: What came.
        sent: The groups expected back, as they went out.
    """
    for name in ("trunk", "norm"):
        if reason := _array_fault(name, getattr(update, name), getattr(sent, name)):
            return reason
    if update.form != sent.form:
        return f"trunk travels as {update.form}, expected {sent.form}"
    if (update.head is None) != (sent.head is None):
        return f"head was {'not ' if sent.head is None else ''}expected"
    if update.head is None or sent.head is None:
        return ""
    if update.head.class_names != sent.head.class_names:
        return f"head rows are {list(update.head.class_names)}, expected {list(sent.head.class_names)}"
    return _array_fault("head.weight", update.head.weight, sent.head.weight) or _array_fault(
        "head.bias", update.head.bias, sent.head.bias
    )


def statistics_fault(came: Arrays, expected: Mapping[str, tuple[int, ...]]) -> str:
    """Say why a reply's statistics cannot count, or return an empty string; NaN is "nothing to say"."""
    shapes = {name: array.shape for name, array in came.items()}
    return "" if shapes == dict(expected) else f"statistics are {shapes}, expected {dict(expected)}"


def _array_fault(name: str, came: NDArray[np.float32] | None, expected: NDArray[np.float32] | None) -> str:
    if came is None or expected is None:
        return "" if came is expected else f"{name} was {'not ' if expected is None else ''}expected"
    if came.shape != expected.shape:
        return f"{name} has shape {came.shape}, expected {expected.shape}"
    return "" if np.isfinite(came).all() else f"{name} holds values that are not finite"
