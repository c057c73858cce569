"""What another hospital can tell from the models that it receives: was an image trained on at some hospital?

PYTHONPATH=. python benchmarks/passed_models.py [--seeds 3] [--rounds 12] [--rate 1e-3]

HAM10000 in the pattern `drawn7` of the benchmark. Methods that pass a model on are attacked beside one that averages.
Each attacker knows the images and labels of 40 training lesions of each hospital, and of 280 test lesions that nobody
trained on, and orders them by three scores: their loss by the last model that it saw (negative), the sum over rounds of
the drop of their loss, and the sum over rounds of the cosine between the model's change and the image's own gradient
(Li et al., "Effective Passive Membership Inference Attacks in Federated Learning Against Overparameterized Models",
ICLR 2023). The attackers are:

- *the coordinator*, which sees each hospital's update;
- *the next hospital*, together with the one before (passing alone): both see the model before and after a hospital;
- *a hospital*, which compares the model that it receives with the one that it returned a round before (passing), or
  with the one that it received a round before (averaging). It attacks the hospital after it in the order of names, by
  the classes whose rows both have.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.config import ExperimentFile, read_experiment
from polyclinic.common.metrics.auroc import compute_mean_auroc
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import ModelState, make_model_layout, read_model_state, write_model_state
from polyclinic.common.simulation import load_simulated_data
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.engine.aggregator import add_sequential_site_update
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.claims import format_markdown_table
from tests.federations import overheard

BENCHMARK_FOLDER = Path("experiments/benchmark")
BENCHMARK_BLOCK = ("ham10000", "drawn7")
ATTACKED_METHODS = ("surgical", "polyclinic", "polyclinic_passing", "sfedkd")
PASSING_METHODS = ATTACKED_METHODS[1:]
MEMBERS_PER_SITE = 40
"""Training images of each hospital that are attacked."""
NON_MEMBERS = 280
"""Attacked images that nobody trained on."""
FALSE_POSITIVE_RATE = 0.05
ROWS_AT_ONCE = 80
"""Number of images whose gradients are held in memory at a time."""
ATTACK_SCORES = ("loss", "drop", "cosine")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Visit:
    """One request to train and its reply: the model that a site received and the one that it returned."""

    site: str
    round: int
    received: ModelState
    returned: ModelState


@dataclass(frozen=True)
class Target:
    """The images that an attacker tests.

    Attributes:
        images: ``(n, channels, height, width)`` float32.
        labels: ``(n, classes)`` float32, 0 or 1.
        members: ``(n,)``, the site that trains on an image; "" for none.
        annotated: Site -> ``(classes,)`` bool, the classes that it labels.
    """

    images: Tensor
    labels: Tensor
    members: NDArray[np.str_]
    annotated: dict[str, NDArray[np.bool_]]


def run_and_record_visits(file: ExperimentFile) -> list[Visit]:
    """Run a federation in this process, and return all requests to train with their replies, in their order."""
    with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
        traffic = overheard(patches)
        simulate(file, Path(folder) / "run", Console(quiet=True), pages=False)
    visits = list[Visit]()
    for request, reply in zip(traffic.requests, traffic.replies, strict=True):
        trunk, norm, head = request.model.trunk, request.model.norm, request.model.head
        assert trunk is not None
        assert norm is not None
        assert head is not None
        received = ModelState(trunk, norm, head)
        returned = add_sequential_site_update(received, reply, None, {}).model
        visits.append(Visit(reply.site, request.round, received, returned))
    return visits


def draw_target(file: ExperimentFile, seed: int) -> tuple[Target, tuple[str, ...]]:
    """Draw the images that attackers test; return them and the names of all classes."""
    data = load_simulated_data(file.experiment, file.path.parent)
    generator, parts, owners = np.random.default_rng(seed), list[ImageSet](), list[str]()
    annotated, names = {}, data.splits.class_names
    for number, part in enumerate(data.parts, 1):
        site = f"site-{number}"
        rows = generator.choice(part.train, MEMBERS_PER_SITE, replace=False)
        parts.append(data.splits.train.select_rows(np.sort(rows)))
        owners += [site] * MEMBERS_PER_SITE
        annotated[site] = np.isin(names, part.class_names)
    rows = generator.choice(len(data.splits.test), NON_MEMBERS, replace=False)
    parts.append(data.splits.test.select_rows(np.sort(rows)))
    owners += [""] * NON_MEMBERS
    pixels = [convert_to_channels_first(part.images) for part in parts]
    images = torch.cat(pixels).float()
    labels = torch.from_numpy(np.concatenate([np.nan_to_num(part.labels) for part in parts])).float()
    return Target(images, labels, np.array(owners), annotated), tuple(names)


@dataclass
class Attacker:
    """Scores images by models that were seen before and after their training."""

    network: SplitNetwork
    target: Target

    def load(self, model: ModelState) -> NDArray[np.bool_]:
        """Write a model into the network; return which head rows it has, ``(classes,)``."""
        names = self.network.class_names
        has_row = np.isin(names, model.head.class_names)
        head = read_model_state(self.network).head
        # A site that averages receives the rows of its own classes alone; the others stay, and no score reads them.
        rows = model.head.select_rows(tuple(name for name, has in zip(names, has_row, strict=True) if has))
        head.weight[has_row], head.bias[has_row] = rows.weight, rows.bias
        write_model_state(self.network, trunk=model.trunk, norm=model.norm, head=head)
        self.network.eval()
        return has_row

    def compute_losses(self, model: ModelState, classes: NDArray[np.bool_]) -> Floats:
        """Compute the mean loss over these classes of each image, ``(n,)``."""
        self.load(model)
        with torch.no_grad():
            logits = self.network(self.target.images)[:, classes]
            loss = binary_cross_entropy_with_logits(logits, self.target.labels[:, classes], reduction="none")
        return loss.mean(1).double().numpy()

    def compute_cosines(self, before: ModelState, after: ModelState, classes: NDArray[np.bool_]) -> Floats:
        """Compute the cosine between the change of the trunk and each image's negative gradient, ``(n,)``."""
        self.load(before)
        slices = make_model_layout(self.network).tensor_slices()
        parameters = {name: value.detach() for name, value in self.network.named_parameters() if name in slices}
        chosen = torch.from_numpy(np.flatnonzero(classes))

        def compute_loss(values: dict[str, Tensor], image: Tensor, labels: Tensor) -> Tensor:
            logits = functional_call(self.network, values, (image[None],))
            return binary_cross_entropy_with_logits(logits[0, chosen], labels[chosen])

        change = after.trunk - before.trunk
        products = np.zeros(len(self.target.images))
        squares = np.zeros(len(self.target.images))
        gradients = vmap(grad(compute_loss), in_dims=(None, 0, 0))
        count = len(self.target.images)
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            of_rows = gradients(parameters, self.target.images[rows], self.target.labels[rows])
            for name, gradient in of_rows.items():
                flat = gradient.detach().flatten(1)
                products[rows] -= (flat @ torch.from_numpy(change[slices[name]])).numpy()
                squares[rows] += flat.square().sum(1).numpy()
        cosines: Floats = products / np.sqrt(squares * np.square(change, dtype=np.float64).sum() + 1e-30)
        return cosines

    def score_images(
        self, pairs: Sequence[tuple[ModelState, ModelState]], classes: NDArray[np.bool_]
    ) -> dict[str, Floats]:
        """Return each score of each image, ``(n,)``, from pairs of a model before and after training."""
        drop, cosine = np.zeros(len(self.target.images)), np.zeros(len(self.target.images))
        for before, after in pairs:
            drop += self.compute_losses(before, classes) - self.compute_losses(after, classes)
            cosine += self.compute_cosines(before, after, classes)
        return {"loss": -self.compute_losses(pairs[-1][1], classes), "drop": drop, "cosine": cosine}


def pair_models_of_a_hospital(
    visits: Iterable[Visit], site: str, *, passing: bool
) -> list[tuple[ModelState, ModelState]]:
    """Return the pairs of models whose difference is the training of other sites, as one site sees it."""
    of_site = [visit for visit in visits if visit.site == site]
    return [(first.returned if passing else first.received, second.received) for first, second in pairwise(of_site)]


def judge_scores(scores: Floats, members: NDArray[np.bool_], non_members: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the AUROC of members against non_members, and the share of members surer than 95 of 100 non_members."""
    both = members | non_members
    auroc = compute_mean_auroc(scores[both][:, None], members[both][:, None].astype(np.float64))
    limit = np.quantile(scores[non_members], 1 - FALSE_POSITIVE_RATE)
    return float(auroc or 0.5), float((scores[members] > limit).mean())


def attack_federation(
    name: str, visits: Sequence[Visit], attacker: Attacker
) -> Iterator[tuple[str, str, float, float]]:
    """Yield attacker, score, AUROC and share for each attacker and each hospital that it attacks."""
    target = attacker.target
    non_members, sites = target.members == "", list(target.annotated)
    for site, annotated in target.annotated.items():
        members = target.members == site
        # A round that trains nothing (solved rows) changes no trunk.
        pairs = [
            (visit.received, visit.returned)
            for visit in visits
            if visit.site == site and not np.array_equal(visit.received.trunk, visit.returned.trunk)
        ]
        view = "the coordinator, or both neighbours" if name in PASSING_METHODS else "the coordinator"
        for score, values in attacker.score_images(pairs, annotated).items():
            yield view, score, *judge_scores(values, members, non_members)
        pairs = pair_models_of_a_hospital(visits, site, passing=name in PASSING_METHODS)
        if not pairs:
            continue
        other = sites[(sites.index(site) + 1) % len(sites)]
        classes = attacker.load(pairs[0][1]) & target.annotated[other]
        if not classes.any():
            continue
        members = target.members == other
        for score, values in attacker.score_images(pairs, classes).items():
            yield "one other hospital", score, *judge_scores(values, members, non_members)


def main() -> None:
    """Print a table: method and attacker, and for each score the AUROC and the share, mean over hospitals and seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    plan = BenchmarkVariantPlan.read_benchmark_variant(BENCHMARK_FOLDER, "ours12")
    rows = list[list[str]]()
    for name in ATTACKED_METHODS:
        method = next(each for each in plan.benchmark.methods if each.label == name)
        results = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
        for seed in range(options.seeds):
            planned = plan.make_planned_run(*BENCHMARK_BLOCK, method, options.rate, seed)
            file = read_experiment(planned.experiment, (*planned.overrides, f"run.rounds={options.rounds}"))
            visits = run_and_record_visits(file)
            target, names = draw_target(file, seed)
            spec = file.experiment.model.model_copy(update={"weights": None})
            attacker = Attacker(build_network(spec, names, seed), target)
            for view, score, auroc, share in attack_federation(name, visits, attacker):
                results[view, score].append((auroc, share))
        for view in dict.fromkeys(view for view, _ in results):
            means = [np.mean(results[view, score], axis=0) for score in ATTACK_SCORES]
            rows.append([f"`{name}`", view, *(f"{auroc:.3f}, {share:.2f}" for auroc, share in means)])
    print(format_markdown_table(["method", "attacker", *ATTACK_SCORES], rows, names=2))


if __name__ == "__main__":
    main()
