"""What the patients' privacy ledger costs a hospital's start and rounds.

PYTHONPATH=. python benchmarks/ledger.py 100000      # patients, one image each, 64 x 64 pixels
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyclinic.client.site.patient_ledger import PatientCosts, PatientLedger, PrivacyCostEntry, make_cost_id
from polyclinic.client.training.privacy import compute_largest_patient_epsilon
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixel_cache import PixelCache
from polyclinic.strategies.privacy.mechanism import NoisySteps

SIDE = 64


def make_encrypted_images(folder: Path, count: int) -> ImageSet:
    """Write noise to an encrypted store of decoded images, as a hospital keeps them by default."""
    rng = np.random.default_rng(1)
    cache = PixelCache(folder, (SIDE, SIDE), secret=b"k" * 32)
    with cache.open_cache_writer() as out:
        out.reserve_picture_rows(count)
        for number in range(count):
            out.add_picture_to_cache(number.to_bytes(32), rng.integers(0, 255, (SIDE, SIDE), np.uint8))
    names = np.char.add("patient-", np.arange(count).astype(np.str_))
    labels = np.zeros((count, 1), np.float32)
    return ImageSet(cache.open_cached_pictures(), labels, ("a",), names, np.full(count, ""))


def report_seconds(what: str, work: Callable[[], object]) -> None:
    """Print how much processor time the work takes."""
    began = time.process_time()
    work()
    print(f"{what:60} {time.process_time() - began:8.3f} s", flush=True)


class TimedDecision:
    """Computes the epsilon of a round, and counts the processor time (s) of each call."""

    def __init__(self, steps: Sequence[NoisySteps]) -> None:
        self._steps = steps
        self.seconds = list[float]()
        self.epsilons = list[float]()

    def __call__(self, costs: PatientCosts) -> None:
        began = time.process_time()
        self.epsilons.append(compute_largest_patient_epsilon(costs, 1e-5, self._steps))
        self.seconds.append(time.process_time() - began)


def main(patients: int) -> None:
    """Time the first and a later start, and one round, for so many patients."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = make_encrypted_images(folder / "images", patients)

        def open_ledger() -> PatientLedger:
            return PatientLedger(folder / "ledger", folder, site="north", federation="trial")

        report_seconds("first start: decrypt and fingerprint", lambda: open_ledger().identify_patients(images))
        ledger = open_ledger()
        report_seconds("later start: fingerprint", lambda: ledger.identify_patients(images))
        step = NoisySteps(1.0, 0.01, 100)
        for runs in range(10):
            part = images.select_rows(np.arange(runs * patients // 20, patients))
            other = open_ledger()
            other.identify_patients(part)
            for server_round in range(100):
                cost = PrivacyCostEntry(f"run {runs}", server_round, "", 1.0, 0.01, 100, make_cost_id())
                other.spend_costs([replace(cost, request=cost.id)])
        report_seconds("first look at 1,000 costs of 10 groups", lambda: ledger.list_costs())
        costs = ledger.list_costs()
        report_seconds(
            "epsilon of the patient of whom most is spent", lambda: compute_largest_patient_epsilon(costs, 1e-5, [step])
        )
        cost = PrivacyCostEntry("run", 1, "request", 1.0, 0.01, 99, make_cost_id())
        decision = TimedDecision([cost.noisy_steps])
        report_seconds("reserve a round, with the decision", lambda: ledger.reserve_cost(cost, decision))
        print(f"{'of it the decision, before and under the lock':60} {decision.seconds[0]:8.3f} s", end="")
        print(f" {decision.seconds[1]:8.3f} s")
        assert decision.epsilons[0] == decision.epsilons[1]
        report_seconds("spend it", lambda: ledger.spend_cost(cost))
        print(f"{'file':60} {ledger.path.stat().st_size / 1e6:8.1f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]))
