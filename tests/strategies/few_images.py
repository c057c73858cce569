"""Few digits, where a test asks nothing of how well a model learns: training takes a third of the time.

Later choices of one name win: ``FEW`` and ``FEW_AT_COORDINATOR`` stand after what a method needs.
"""

import json

import numpy as np
from sklearn.datasets import load_digits

from tests.federations import needs_of, temporary_folder

FILE = temporary_folder("polyclinic-few-") / "digits.npz"
SPEC = f'{{kind = "npz", path = "{FILE}", classes = {json.dumps(list("0123456789"))}}}'
FEW, FEW_AT_COORDINATOR = f"data={SPEC}", f"server_data={SPEC}"
ENDS = {"train": 450, "val": 570, "test": 690}
"""Place of the last image of each part."""


def write_few_images() -> None:
    """Write the file of :data:`FEW`: the first 690 digits at 16 x 16 pixels."""
    digits, arrays, begin = load_digits(), {}, 0
    pixels = np.kron(15 * digits.images, np.ones((2, 2))).astype(np.uint8)  # 8 x 8 of 0 to 16
    for part, end in ENDS.items():
        arrays |= {f"{part}_images": pixels[begin:end], f"{part}_labels": digits.target[begin:end, None]}
        begin = end
    np.savez(FILE, **arrays)


def few_needs_of(method: str) -> tuple[str, ...]:
    """What a method cannot do without, with few images."""
    needs = needs_of(method)
    own = [FEW_AT_COORDINATOR] * any(need.startswith("server_data") for need in needs)
    return (*needs, FEW, *own)
