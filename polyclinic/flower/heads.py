"""A model's last layer in its ``state_dict``, as rows with names."""

import difflib

import numpy as np
from flwr.app import Array, ArrayRecord

from common.models.network import Head


def near(head: str, layers: list[str]) -> str:
    """`` Did you mean ...?`` for the layer that is meant; empty where none is near."""
    whole = head.removesuffix(".weight").removesuffix(".bias")  # a tensor's name in place of its layer's
    inside = [layer for layer in layers if layer.endswith(f".{whole}")]  # _orig_mod.fc of a compiled model
    meant = [whole] if whole in layers else inside or difflib.get_close_matches(head, layers, 1)
    return f" Did you mean {meant[0]!r}?" if meant else ""


def head_of(arrays: ArrayRecord, head: str, classes: tuple[str, ...]) -> Head:
    """A model's last layer, copied; zeros for a bias that it does not have.

    Raises:
        ValueError: If the model has no layer of this name, or it has another number of rows.
    """
    if (key := f"{head}.weight") not in arrays:
        if parts := sorted(name for name in arrays if name.startswith(f"{head}.") and name != f"{head}.bias"):
            raise ValueError(f"the model has {parts} in place of {key!r}: the head must be a plain torch.nn.Linear")
        layers = sorted(name.removesuffix(".weight") for name in arrays if name.endswith(".weight"))
        raise ValueError(f"the model has no {key!r}; its layers with weights are {layers}.{near(head, layers)}")
    if (kind := arrays[key].numpy().dtype) not in (np.float32, np.float16):
        raise ValueError(f"{key!r} is {kind}; head rows are averaged from float32 or float16: use model.float()")
    weight = arrays[key].numpy().astype(np.float32)
    if weight.ndim != 2 or len(weight) != len(classes):
        raise ValueError(
            f"{key!r} has the shape {weight.shape}; {len(classes)} classes need ({len(classes)}, features)"
        )
    bias = (
        arrays[f"{head}.bias"].numpy().astype(np.float32) if f"{head}.bias" in arrays else np.zeros(len(classes), "f")
    )
    return Head(classes, weight, bias)


def with_head(arrays: ArrayRecord, name: str, head: Head) -> ArrayRecord:
    """A record with another head, in the types that it had."""
    put = {f"{name}.weight": head.weight, f"{name}.bias": head.bias}
    return ArrayRecord(
        {key: Array(put[key].astype(array.numpy().dtype)) if key in put else array for key, array in arrays.items()}
    )


def other_rows(arrays: ArrayRecord, head: str, classes: tuple[str, ...]) -> list[str]:
    """Tensors of the head beside weight and bias that have a row for each class, as LoRA's have."""
    layer = head.removesuffix(".base_layer")  # where PEFT puts the layer that it wraps
    rows = {f"{head}.weight", f"{head}.bias"}
    return [
        name
        for name, array in arrays.items()
        if name.startswith(f"{layer}.") and name not in rows and tuple(array.shape)[:1] == (len(classes),)
    ]
