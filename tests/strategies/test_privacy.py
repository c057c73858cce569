"""Differential privacy's maths: gradients image by image, clipping, noise, what it costs, and where it is refused."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from pydantic import ValidationError
from scipy import stats
from torch import nn

from polyclinic.common.config import PrivacySection, TrainingSection, make_hospital_plan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head, SplitNetwork, build_network, set_train_mode
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import ModelGroups
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local.losses import PLAIN_LOSSES
from polyclinic.strategies.local.objective import LabelledExamples, plain
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.training import FrozenNetworkParts, TrainingTask, train_epoch
from polyclinic.strategies.local.updates import clip_update_to_norm
from polyclinic.strategies.privacy.gradients import (
    PrivateEpochTrainer,
    compute_losses_by_image,
    sum_clipped_gradients,
)
from polyclinic.strategies.privacy.image_gradients import record_per_image_gradients, replace_dropout_layers
from polyclinic.strategies.privacy.mechanism import (
    Accountant,
    NoisySteps,
    ReplyNoise,
    clip_arrays_to_norm,
    compute_epsilon,
    find_noise_multiplier,
    has_trained_batch_norm,
    make_site_privacy_settings,
)
from polyclinic.strategies.privacy.noise import ROUNDING_MARGIN_FACTOR, NoiseQuantizationGrid, make_seeded_noise_source
from polyclinic.strategies.registry import build_site_method
from tests.federations import experiment, federation, given_weights

BCE = PLAIN_LOSSES["multi_label", "masked"]
EVERY = torch.tensor([True, True])
SAMPLE = ("privacy.level=sample", "privacy.noise_multiplier=1", "evaluation.checkpoint=last")
GROUP = (*SAMPLE, "model.norm=group")
ON_UPDATE = ("privacy.level=update", "privacy.noise_multiplier=1", "evaluation.checkpoint=last")


def network(architecture: str = "tiny_cnn", size: int = 16) -> SplitNetwork:
    spec = ModelSpec.model_validate(
        {"architecture": architecture, "channels": 1, "image_size": size, "norm": "group", "dropout": 0.0}
    )
    return build_network(spec, ("a", "b"), seed=4)


def examples(count: int, size: int = 16) -> LabelledExamples:
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 256, (count, 1, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 2, (count, 2), generator=generator).float()
    return LabelledExamples(images, labels, EVERY)


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("architecture", "size"), [("tiny_cnn", 16), ("fedsld_cnn", 16), ("unifed_resnet18", 32)])
def test_every_images_gradient_is_that_of_a_batch_of_it_alone(architecture: str, size: int) -> None:
    trained, batch = network(architecture, size), examples(3, size)
    labels = batch.labels.clone()
    labels[1, 0] = torch.nan
    set_train_mode(trained)
    with record_per_image_gradients(trained) as learning:
        compute_losses_by_image(BCE, trained(batch.images), labels, EVERY).sum().backward()
        gradients = [parameter.grad_sample for parameter in learning]
    for image in range(3):
        trained.zero_grad()
        BCE(trained(batch.images[image : image + 1]), labels[image : image + 1], EVERY).backward()
        for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient[image], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_network_is_as_before_once_its_gradients_were_looked_at() -> None:
    trained = network()
    before = [(name, type(module)) for name, module in trained.named_modules()]
    with record_per_image_gradients(trained):
        pass
    assert [(name, type(module)) for name, module in trained.named_modules()] == before
    assert not any(hasattr(parameter, "grad_sample") for parameter in trained.parameters())


def released_sum(gradients: list[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    grid = NoiseQuantizationGrid(0.0, max_norm)
    return [
        grid.add_noise_to_sum(total, make_seeded_noise_source(0)) for total in sum_clipped_gradients(gradients, grid)
    ]


def test_a_long_gradient_is_shortened_over_all_parameters_together_and_a_short_one_stays() -> None:
    # Image 1: (3, 4), length 5, to length 1: (0.6, 0.8). Image 2: (0.3, -0.4), length 0.5, stays. Image 3: nothing.
    weight, bias = torch.tensor([[3.0], [0.3], [0.0]]), torch.tensor([[4.0], [-0.4], [0.0]])
    first, second = released_sum([weight, bias], max_norm=1.0)
    torch.testing.assert_close(first, torch.tensor([0.9]), rtol=2e-6, atol=0)
    torch.testing.assert_close(second, torch.tensor([0.4]), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("deviation", [0.0, 0.3, 30.0])
def test_no_gradient_is_longer_than_the_bound_in_whole_steps_of_the_grid(deviation: float) -> None:
    generator, grid = torch.Generator().manual_seed(1), NoiseQuantizationGrid(deviation, 0.7)
    for scale in (1e-9, 1.0, 1e30):
        gradients = [scale * torch.randn(1, *shape, generator=generator) for shape in ((40, 30), (50,), ())]
        totals = sum_clipped_gradients(gradients, grid)
        squares = sum(int(step) ** 2 for total in totals for step in total.flatten().tolist())
        assert all(torch.equal(total, total.round()) for total in totals)
        assert squares <= (grid.longest / grid.step_size) ** 2


@pytest.mark.parametrize("bound", [1e-6, 1e6])
@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.6, 1e6])
@pytest.mark.parametrize("numbers", [1, 7_000, 400_000])
def test_no_clipped_update_is_longer_than_its_bound(bound: float, noise_multiplier: float, numbers: int) -> None:
    """All numbers alike: then rounding makes all of them longer, or none."""
    grid = NoiseQuantizationGrid(noise_multiplier * bound, bound)
    for size in (1e-30, 1e-6, 1.0, 1e30):
        values = torch.full((1, numbers), size)
        (total,) = sum_clipped_gradients([values], grid)
        assert float(total.norm()) * grid.step_size <= bound
        update = clip_update_to_norm(ModelGroups(values[0].numpy()), bound * ROUNDING_MARGIN_FACTOR)
        assert np.linalg.norm(update.trunk.astype(np.float64)) <= bound
        shortened = clip_arrays_to_norm({"x": values[0].numpy()}, bound * ROUNDING_MARGIN_FACTOR)["x"]
        assert np.linalg.norm(shortened.astype(np.float64)) <= bound


@pytest.mark.parametrize("name", ["max_grad_norm", "max_update_norm", "max_statistics_norm"])
@pytest.mark.parametrize("bound", [1.69e-43, 5.7e-38, 9e-7, 1.1e6, 1e30])
def test_bounds_at_which_rounding_would_count_are_refused(name: str, bound: float) -> None:
    with pytest.raises(ValidationError, match=name):
        PrivacySection.model_validate({"level": "patient", "noise_multiplier": 1.0, name: bound})


def test_the_sum_does_not_depend_on_the_order_of_the_images() -> None:
    gradients, grid = torch.randn(500, 300, generator=torch.Generator().manual_seed(2)), NoiseQuantizationGrid(1.0, 1.0)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(3))
    forwards, backwards = (sum_clipped_gradients([rows], grid)[0] for rows in (gradients, gradients[order]))
    assert torch.equal(forwards, backwards)


@pytest.mark.parametrize("share", [0.51, 0.75, 1.0, 1.4, 1e3])
def test_no_rounding_of_a_very_small_factor_makes_a_gradient_longer_than_the_bound(share: float) -> None:
    bound = share * 2.0**-149 * 9e38  # the smallest number above 0, and the length of the gradient
    (total,) = released_sum([torch.full((1, 9), 3e38)], max_norm=bound)
    assert float(total.double().norm()) <= bound


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_an_image_whose_gradient_is_not_finite_adds_nothing(odd: float) -> None:
    weight = torch.tensor([[0.5, 0.1], [odd, 0.3], [0.25, 0.2]])
    (total,) = released_sum([weight], max_norm=1.0)
    torch.testing.assert_close(total, torch.tensor([0.75, 0.3]))


def private(noise_multiplier: float, max_norm: float, *, rate: float, steps: int, images: int) -> PrivateEpochTrainer:
    return PrivateEpochTrainer(BCE, max_norm, noise_multiplier, rate, steps, rate * images, make_seeded_noise_source(3))


def exercise(of: LabelledExamples, batch_size: int) -> TrainingTask:
    spec = TrainingSection(batch_size=batch_size, lr=0.1, optimizer="sgd")
    return TrainingTask(of, plain(BCE), spec, AugmentationSpec(), FrozenNetworkParts())


def trunk_after(epoch: object, of: TrainingTask, epochs: int = 3) -> np.ndarray:
    trained = network()
    optimizer, generator = make_optimizer(trained, of.spec, of.spec.lr), torch.Generator().manual_seed(5)
    for _ in range(epochs):
        epoch(trained, of, optimizer, generator)
    return read_model_state(trained).trunk


@pytest.mark.parametrize("batch_size", [20, 50])
def test_without_noise_and_with_room_for_every_gradient_it_is_plain_training(batch_size: int) -> None:
    of = exercise(examples(20), batch_size)
    whole = private(0.0, 1e3, rate=1.0, steps=1, images=20)
    np.testing.assert_allclose(trunk_after(whole, of), trunk_after(train_epoch, of), rtol=1e-4, atol=1e-6)


def test_images_are_taken_a_few_at_a_time_without_changing_the_step() -> None:
    whole, by_six = exercise(examples(20), 20), exercise(examples(20), 6)
    epoch = private(0.0, 0.05, rate=1.0, steps=1, images=20)
    np.testing.assert_allclose(trunk_after(epoch, by_six), trunk_after(epoch, whole), rtol=1e-4, atol=1e-6)


def test_a_patients_images_are_clipped_together() -> None:
    of, trained = exercise(examples(20), 6), network()
    owners = torch.tensor([0] * 9 + [1] * 4 + [2] * 7)  # the first is more than a batch
    with record_per_image_gradients(trained) as learning:
        compute_losses_by_image(BCE, trained(of.examples.images), of.examples.labels, EVERY).sum().backward()
        each = [parameter.grad_sample for parameter in learning]
    sums = [torch.stack([gradient[owners == owner].sum(dim=0) for owner in range(3)]) for gradient in each]
    norms = torch.stack([part.flatten(1).square().sum(1) for part in sums]).sum(0).sqrt()
    bound = float(norms.sort().values[1])  # two of the three are shortened, or just not
    expected = [(part * (bound / norms).clamp(max=1).view(-1, *[1] * (part.dim() - 1))).sum(0) for part in sums]
    epochs = replace(private(0.0, bound, rate=1.0, steps=1, images=20), owners=owners)
    before = [parameter.detach().clone() for parameter in network().parameters()]
    trained = network()
    epochs(trained, of, torch.optim.SGD(trained.parameters(), lr=20.0), torch.Generator())
    for parameter, start, step in zip(trained.parameters(), before, expected, strict=True):
        torch.testing.assert_close(start - parameter, step, rtol=1e-3, atol=1e-5)


def test_an_empty_draw_is_a_step_of_noise() -> None:
    never = private(1.0, 1.0, rate=1e-12, steps=2, images=10**12)
    trained, of = network(), exercise(examples(20), 5)
    before = read_model_state(trained).trunk
    losses = never(trained, of, make_optimizer(trained, of.spec, 0.1), torch.Generator())
    assert losses.tolist() == [0.0, 0.0]
    assert (read_model_state(trained).trunk != before).all()


@pytest.mark.parametrize(("images", "owners"), [(1, 1), (15, 15), (16, 16), (17, 17), (33, 33), (33, 2), (40, 7)])
def test_a_network_sees_batches_of_one_size_however_many_images_are_drawn(images: int, owners: int) -> None:
    """A layer that can make nothing of one image would else say that one was left over."""
    sizes = []
    for rate in (1.0, 0.5, 1e-12):
        trained, of = network(), exercise(examples(images), 16)
        trained.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
        epoch = replace(private(1.0, 1.0, rate=rate, steps=2, images=images), owners=torch.arange(images) % owners)
        epoch(trained, of, make_optimizer(trained, of.spec, 0.1), torch.Generator())
    assert sizes.count(17) == 3  # of random images, in the trial before; as many whoever is drawn
    assert set(sizes) == {16, 17}


@pytest.mark.parametrize(("images", "rate"), [(1, 1.0), (33, 1.0), (33, 1e-12)])
def test_a_network_that_fails_does_so_no_matter_whether_anybody_is_drawn(images: int, rate: float) -> None:
    def fails(*anything: object) -> None:
        raise ValueError("Expected more than 1 value per channel")

    trained, of = network(), exercise(examples(images), 16)
    trained.register_forward_pre_hook(fails)
    epoch = private(1.0, 1.0, rate=rate, steps=2, images=images)
    with pytest.raises(BadInput, match="ValueError: Expected more than 1 value"):
        epoch(trained, of, make_optimizer(trained, of.spec, 0.1), torch.Generator())


# ---------------------------------------------------------------------- noise


def reply(noise_multiplier: float, update_norm: float, statistics_norm: float) -> ReplyNoise:
    return ReplyNoise(update_norm, statistics_norm, noise_multiplier, make_seeded_noise_source(2))


def test_update_and_statistics_are_each_shortened_to_their_own_bound() -> None:
    # Trunk and head are one vector of length 5; the statistics have length 13 once what is not there is 0.
    head = Head(("a",), np.array([[0.0, 4.0]], np.float32), np.array([0.0], np.float32))
    groups = ModelGroups(trunk=np.array([3.0, 0.0], np.float32), head=head)
    long = {"x": np.array([5.0, np.nan], np.float32), "y": np.array([[-12.0]], np.float32)}
    update, statistics = reply(0.0, 1.0, 26.0)(groups, long)
    np.testing.assert_allclose(update.trunk, [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(update.head.weight, [[0.0, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(statistics["x"], [5.0, 0.0])
    _, statistics = reply(0.0, 1.0, 6.5)(groups, long)
    np.testing.assert_allclose(statistics["y"], [[-6.0]], rtol=1e-6)


@pytest.mark.parametrize("bound", [1e-7, 3e-7, 1e-5, 1e-3, 1.0])
def test_what_is_as_long_as_numbers_can_be_is_shortened_to_the_bound_too(bound: float) -> None:
    longest = np.full(3, np.finfo(np.float32).max, np.float32)
    update, statistics = reply(0.0, bound, bound)(ModelGroups(trunk=longest), {"x": longest * np.float32(np.inf)})
    for array in (update.trunk, statistics["x"]):
        assert np.linalg.norm(array.astype(np.float64)) <= bound


@pytest.mark.parametrize(("sent", "parts"), [({}, 1), ({"x": np.zeros(100_000, np.float32)}, 2)])
def test_noise_covers_the_whole_way_between_two_data_sets(sent: dict[str, np.ndarray], parts: int) -> None:
    # Two updates of length 0.5 lie at most 1 apart: noise of 2 on 1, and the root of two where two parts are sent.
    update, statistics = reply(2.0, 0.5, 0.25)(ModelGroups(trunk=np.zeros(100_000, np.float32)), sent)
    assert update.trunk.std() == pytest.approx(2.0 * parts**0.5, rel=0.02)
    assert [array.std() for array in statistics.values()] == pytest.approx([1.0 * parts**0.5] * len(sent), rel=0.02)


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(("accountant", "direct"), [("rdp", RDPAccountant), ("prv", PRVAccountant)])
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_epsilon_is_what_opacus_says_of_the_same_steps(accountant: str, direct: type, rate: float) -> None:
    counted, steps = direct(), [NoisySteps(4.0, rate, 30), NoisySteps(5.0, rate, 10)]
    for step in steps:
        for _ in range(step.count):
            counted.step(noise_multiplier=step.noise_multiplier, sample_rate=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = counted.get_epsilon(delta=1e-5)
    assert compute_epsilon(steps, 1e-5, accountant) == expected


def test_nothing_costs_nothing_and_no_noise_has_no_price() -> None:
    assert compute_epsilon([], 1e-5, "rdp") == 0.0
    assert compute_epsilon([NoisySteps(1.0, 0.1, 5), NoisySteps(0.0, 0.1, 1)], 1e-5, "rdp") == float("inf")


def test_the_noise_for_an_epsilon_costs_that_and_no_more_and_the_tighter_accountant_asks_for_less() -> None:
    accountants: tuple[Accountant, ...] = ("rdp", "prv")
    noise = [find_noise_multiplier(4.0, 1e-5, sample_rate=0.1, count=50, accountant=name) for name in accountants]
    for name, multiplier in zip(accountants, noise, strict=True):
        assert 3.98 < compute_epsilon([NoisySteps(multiplier, 0.1, 50)], 1e-5, name) <= 4.0, name
    assert noise[1] < 0.97 * noise[0]


@pytest.mark.parametrize(
    "steps", [NoisySteps(1.0, 0.5, 20_000), NoisySteps(0.05, 1.0, 3), NoisySteps(1.0, 1e-4, 3_000_000)]
)
def test_what_the_tighter_accountant_has_no_memory_for_is_counted_by_the_other(steps: NoisySteps) -> None:
    assert compute_epsilon([steps], 1e-5, "prv") == compute_epsilon([steps], 1e-5, "rdp")


def test_an_epsilon_is_spent_over_all_steps_of_the_run(tmp_path: Path) -> None:
    private = ("privacy.level=sample", "privacy.epsilon=3", "model.norm=group", "evaluation.checkpoint=last")
    length = ("run.rounds=4", "training.epochs=2", "training.batch_size=30")
    plan = make_hospital_plan(experiment(tmp_path, *private, *length).experiment)
    privacy = make_site_privacy_settings(plan, build_site_method(plan), images=100)
    # 100 images in batches of 30: four steps an epoch, two epochs a round.
    assert (privacy.noisy_steps_per_round.count, privacy.noisy_steps_per_round.sample_rate) == (8, 0.3)
    run = NoisySteps(privacy.noise_multiplier, 0.3, 4 * 8)
    assert 2.98 < compute_epsilon([run], 1e-5, "prv") <= 3.0


# ---------------------------------------------------------------------- where it is refused


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (SAMPLE, "batch normalisation mixes the images"),
        ((*SAMPLE, "method.trunk=fedbn"), "batch normalisation mixes the images"),
        ((*GROUP, "run.method=fedmlp"), "minimises more than each image's own loss"),
        ((*GROUP, "run.method=fedsld"), "minimises more than each image's own loss"),
        ((*GROUP, "method.warm_up_epochs=1"), "trained without noise"),
        ((*GROUP, "method.proximal_mu=0.1"), "clipped with each image's gradient"),
        ((*GROUP, "run.method=individual"), "sends nothing"),
        ((*GROUP, "run.method=centralised"), "sends nothing"),
        (ON_UPDATE, "running variance of batch normalisation"),
        (("privacy.level=sample", "evaluation.checkpoint=last"), "noise_multiplier or epsilon, one of them"),
        ((*SAMPLE, "privacy.epsilon=1"), "noise_multiplier or epsilon, one of them"),
        (("privacy.noise_multiplier=1",), "noise_multiplier or epsilon, one of them"),
        (SAMPLE[:2], 'set evaluation.checkpoint = "last"'),
    ],
)
def test_noise_that_protects_nothing_is_refused(overrides: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        build_site_method(experiment(tmp_path, *overrides).experiment)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        GROUP,
        (*SAMPLE, "method.trunk=fedbn_plus", given_weights()),
        (*SAMPLE, "model.architecture=fedsld_cnn"),
        (*ON_UPDATE, "method.trunk=fedbn"),
        (*ON_UPDATE, "model.norm=group", "run.method=unifed"),
    ],
)
def test_where_it_does_it_is_not(overrides: tuple[str, ...], tmp_path: Path) -> None:
    build_site_method(experiment(tmp_path, *overrides).experiment)


def test_it_is_known_which_architectures_have_batch_normalisation() -> None:
    names = ("densenet121", "tiny_cnn", "fedsld_cnn", "timm:resnet18", "timm:vit_tiny_patch16_224")
    specs = [ModelSpec.model_validate({"architecture": name, "image_size": 224}) for name in names]
    assert list(map(has_trained_batch_norm, specs)) == [True, True, False, True, False]


# ---------------------------------------------------------------------- a whole run


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sample", "patient", "update"])
def test_a_run_ends_in_the_same_model_again_and_tells_what_it_cost(level: str, tmp_path: Path) -> None:
    overrides = (
        f"privacy.level={level}", "privacy.noise_multiplier=2.0", "model.norm=group", "evaluation.checkpoint=last",
        "partition.sites=2", "run.rounds=1", "training.batch_size=100",
    )  # fmt: skip
    first = federation(tmp_path, *overrides)
    again = federation(tmp_path, *overrides, out="again")
    assert first["model_sha256"] == again["model_sha256"]
    images = first["sites"]["site-1"]["train_samples"]
    rate, count = (100 / images, -(-images // 100)) if level != "update" else (1.0, 1)
    expected = compute_epsilon([NoisySteps(2.0, rate, count)], 1e-5, "prv")
    assert first["privacy"]["epsilon"]["site-1"] == pytest.approx(expected)


def test_secret_dropout_drops_at_its_rate_whole_channels_where_the_layer_does_and_nothing_in_evaluation() -> None:
    network = nn.Sequential(nn.Dropout(0.25), nn.Dropout2d(0.5), nn.Dropout(1.0))
    values = torch.ones(20, 50, 4, 4)
    with replace_dropout_layers(network, make_seeded_noise_source(1)):
        each, channels, none = network[0](values), network[1](values), network[2](values)
        evaluated = network.eval()(values)
    assert [type(layer) for layer in network] == [nn.Dropout, nn.Dropout2d, nn.Dropout]
    assert sorted(each.unique().tolist()) == pytest.approx([0, 4 / 3])
    assert (each == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)  # of 16,000; a deviation is 0.0034
    assert torch.equal(channels, channels[:, :, :1, :1].expand_as(channels))
    assert (channels[:, :, 0, 0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.08)  # of 1,000
    assert not none.any()
    assert torch.equal(evaluated, values)


def test_uniform_numbers_are_even_and_never_one() -> None:
    drawn = make_seeded_noise_source(1).draw_uniform((200_000,))
    assert 0 <= drawn.min().item() < 1e-4
    assert 1 - 1e-4 < drawn.max().item() < 1
    counts = np.histogram(drawn.numpy(), bins=50, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4  # the stream is fixed by its key
