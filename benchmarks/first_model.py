"""What a coordinator finds that has to begin with the plan's own first model, and sends a crafted one in round 2.

PYTHONPATH=. python benchmarks/first_model.py

The imprint of ``attacked.py`` on 60 NIH radiographs, level ``trusted``, by the plan's learning rate (one step of plain
descent). Beside it how far the crafted model is from the first one, in lengths of the hospital's own honest update: a
bound on the step from one model to the next could only be in such lengths, and the plan sets them.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacked import hospital

from polyclinic.client.preview.attack.adversary import Adversary, copy_site_with_images, draw_random_images
from polyclinic.client.preview.attack.images import attack_by_imprinting
from polyclinic.client.preview.attack.suite import MAX_TRAINING_IMAGES
from polyclinic.client.preview.dry_run import choose_preview_experiment
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.config import HospitalPlan, make_hospital_plan
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import ModelState, read_model_state
from polyclinic.common.wire.records import ModelGroups, TrainReply, TrainRequest
from polyclinic.strategies.local.updates import compute_whole_update_norm

RATES = (1000.0, 10.0, 0.1)


@dataclass
class LaterAdversary(Adversary):
    """Asks for the plan's own first model in round 1, and for a crafted one in round 2.

    Attributes:
        rate: The plan's learning rate.
        length: Of the site's update in round 1.
        distance: From the first model to the crafted one.
    """

    rate: float = 1.0
    length: float = 0.0
    distance: float = 0.0

    def plan(self, architecture: str, image_size: int, lr: float, batch_size: int = 0, **training: Any) -> HospitalPlan:
        """A plan of two rounds that names no weights file."""
        plan = super().make_attack_plan(architecture, image_size, self.rate, batch_size, **training)
        return plan.model_copy(update={"run": plan.run.model_copy(update={"rounds": 2}), "weights_sha256": None})

    def request_training(self, plan: HospitalPlan, model: ModelState, run: str = "") -> TrainReply | None:
        """Have the site train in both rounds; try the crafted model in round 1 of another run, too."""
        first = read_model_state(build_network(plan.model, self.head_class_names, plan.run.seed))
        assert super().request_training(plan, model, "crafted") is None
        honest = super().request_training(plan, first, "run")
        assert honest is not None
        change = zip(
            ModelGroups.from_model(model).to_named_arrays().values(),
            ModelGroups.from_model(first).to_named_arrays().values(),
            strict=True,
        )
        self.length = compute_whole_update_norm(honest.update)
        self.distance = sum(float(((a - b).astype(float) ** 2).sum()) for a, b in change) ** 0.5
        facts = {**self._make_attack_request_fields(plan, model, "run"), "round": 2}
        return self._send_request_record("train", TrainRequest(**facts), TrainReply)


def main() -> None:
    """Print one row a learning rate."""
    print("| learning rate | crafted first model | own update | way to the crafted model | found in round 2 |")
    print("| ---: | --- | ---: | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        whole = hospital(Path(folder), SitePolicy(level="trusted"))
        site = copy_site_with_images(whole, train=draw_random_images(whole.train, MAX_TRAINING_IMAGES))
        honest = make_hospital_plan(choose_preview_experiment(None, whole))
        for rate in RATES:
            at = LaterAdversary(site, Path(folder) / f"{rate}", honest, rate=rate)
            result = attack_by_imprinting(at)
            rule = result.response.refusals[0].split(": ")[1]
            way = f"{at.distance:.1f}, {at.distance / at.length:.2g} own updates"
            print(f"| {rate:g} | {rule} | {at.length:.3g} | {way} | {result.recovered} of {result.of} |", flush=True)


if __name__ == "__main__":
    main()
