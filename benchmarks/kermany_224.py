"""Writes the chest radiographs of ../shared/data/kermany_cxr_224 as one npz file, which the benchmark's block reads.

PYTHONPATH=. python benchmarks/kermany_224.py      # runs/kermany_224.npz, 300 MB

The test part is that of the folder's label table; the benchmark takes validation images from the others, by patient.
"""

from pathlib import Path

import numpy as np

from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.load import load_dataset

ROOT = Path(__file__).parents[1]
FOLDER, FILE = ROOT.parent / "shared" / "data" / "kermany_cxr_224", ROOT / "runs" / "kermany_224.npz"


def main() -> None:
    """Decode all pictures, and write them with their labels and patients."""
    spec = FolderDatasetSpec(
        kind="folder",
        images=str(FOLDER / "images"),
        labels=str(FOLDER / "labels.csv"),
        image_column="image",
        label_columns=["Normal", "Bacterial pneumonia", "Viral pneumonia"],
        patient_column="patient",
        split_column="split",
        image_size=224,
    )
    splits = load_dataset(spec, ROOT)
    arrays = {}
    for name, parts in (("train", (splits.train, splits.validation)), ("test", (splits.test,))):
        arrays[f"{name}_images"] = np.concatenate([part.images for part in parts])
        arrays[f"{name}_labels"] = np.concatenate([part.labels for part in parts]).astype(np.uint8)
        arrays[f"{name}_patient"] = np.concatenate([np.array(part.patients, dtype=str) for part in parts])
    FILE.parent.mkdir(exist_ok=True)
    np.savez(FILE, allow_pickle=False, **arrays)
    print(f"{FILE.relative_to(ROOT)}: {len(arrays['train_images'])} and {len(arrays['test_images'])} images")


if __name__ == "__main__":
    main()
