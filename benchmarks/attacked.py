"""What each attack of ``flwr-client preview --attack`` finds under each level of policy, on NIH chest radiographs.

PYTHONPATH=. python benchmarks/attacked.py [--levels trusted,masked,private] [--round-counts-to 5]

One hospital with NIH ChestX-ray14's 14 findings: 1,362 training, 266 validation and 365 test images of 940 patients
(``../shared/data/nih_cxr14``). A row an attack and level, as docs/privacy.md has them.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from polyclinic.client.preview.attack import suite
from polyclinic.client.preview.dry_run import choose_preview_experiment
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import make_hospital_plan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.data.base.image_set import ImageSet

DATA = Path(__file__).parents[2] / "shared" / "data" / "nih_cxr14" / "nih_cxr14_28.npz"
FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax"),
    *("Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia"),
)


def hospital(folder: Path, policy: SitePolicy) -> Site:
    """One hospital with all of it."""
    arrays = np.load(DATA, allow_pickle=False)
    train, validation, test = (
        ImageSet(
            arrays[f"{part}_images"],
            arrays[f"{part}_labels"].astype(np.float32),
            FINDINGS,
            arrays[f"{part}_patient"].astype(str),
            arrays[f"{part}_source"],
        )
        for part in ("train", "val", "test")
    )
    return Site(LabelDeclaration("north", FINDINGS), train, validation, test, folder, policy=policy, durable=False)


def main() -> None:
    """Print one row an attack and level."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", default="trusted,masked,private")
    parser.add_argument("--attacks", default="", help="only those with this in the name")
    parser.add_argument("--round-counts-to", type=int, default=5)
    arguments = parser.parse_args()
    print(
        "| level | attack | found | of | by guessing | seconds | notes |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    suite.ATTACKS = {name: attack for name, attack in suite.ATTACKS.items() if arguments.attacks in name}
    for level in arguments.levels.split(","):
        rounding = {"round_counts_to": arguments.round_counts_to}
        policy = SitePolicy.model_validate({"level": level, **(rounding if level == "trusted" else {})})
        with tempfile.TemporaryDirectory() as folder:
            site = hospital(Path(folder), policy)
            for each in suite.run_attacks(site, make_hospital_plan(choose_preview_experiment(None, site))):
                facts = f"{each.recovered} | {each.of} | {each.by_chance:.1f} | {each.seconds:.0f}"
                print(f"| {level} | {each.name} | {facts} | {'; '.join(each.notes)} |", flush=True)


if __name__ == "__main__":
    main()
