"""How often the check's rule for inverted pictures is right on real ones, as they are and turned round.

python benchmarks/inverted.py FOLDER        # npz files in MedMNIST's layout
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.check.pictures import picture_looks_inverted

SHOWN = 1000
"""Images of a file, spread evenly over its training part."""


def share(images: NDArray[np.uint8]) -> tuple[int, float]:
    """How many pictures tell, and which part of these looks inverted."""
    verdicts = [picture_looks_inverted(image) for image in images]
    telling = [each for each in verdicts if each is not None]
    return len(telling), sum(telling) / max(1, len(telling))


def main() -> None:
    print(f"{'file':28} {'images':>6} {'tell':>6} {'inverted':>9} {'turned':>7}")
    for path in sorted(Path(sys.argv[1]).rglob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            if "train_images" not in arrays or arrays["train_images"].ndim != 3:
                continue
            images = arrays["train_images"]
        some = images[:: max(1, len(images) // SHOWN)]
        tell, as_they_are = share(some)
        _, turned = share(255 - some)
        print(f"{path.name:28} {len(some):6} {tell:6} {as_they_are:9.1%} {turned:7.1%}")


if __name__ == "__main__":
    main()
