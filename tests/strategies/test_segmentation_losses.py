"""The losses of segmentation: numbers worked by hand, and what a class that is not annotated must not do."""

import math

import pytest
import torch
from torch import Tensor

from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.segmentation_losses import (
    DICE_SMOOTHING_PIXELS,
    SEGMENTATION_LOSSES,
    conditional_distillation_loss,
    dice_loss_of_known_pixels,
    exclusion_loss,
    exclusive_loss_over_all_classes,
    independent_distillation_loss,
    marginal_loss,
    overlapping_loss,
    overlapping_loss_over_all_classes,
)

NAN = float("nan")
OWN = torch.tensor([True, False])
BOTH = torch.tensor([True, True])
# Two pixels and two classes, of which the site annotates the first: it is in pixel 0 and not in pixel 1.
LABELS = torch.tensor([[[[1.0, 0.0]], [[NAN, NAN]]]])  # (1, 2, 1, 2)
# Softmax with the background's 0: exp of the logits is 3 and 1 in pixel 0, 2 and 5 in pixel 1.
LOGITS = torch.tensor([[[[3.0, 2.0]], [[1.0, 5.0]]]]).log()


def volume(values: Tensor) -> Tensor:
    """Return the same pixels as voxels of a volume of two slices, ``(1, 2, 2, 1, 1)``."""
    return values.movedim(-1, 2)[..., None]


def test_marginal_loss_by_hand() -> None:
    # Pixel 0 shows the class: 3 of 1 + 3 + 1. Pixel 1 shows background or the unknown class: 1 + 5 of 1 + 2 + 5.
    cross_entropy = (-math.log(3 / 5) - math.log(6 / 8)) / 2
    # Dice of the annotated class: predicted 3/5 and 2/8, outlined 1 and 0; one pixel is added to both sides.
    dice = (2 * 3 / 5 + DICE_SMOOTHING_PIXELS) / (3 / 5 + 2 / 8 + 1 + DICE_SMOOTHING_PIXELS)
    assert float(marginal_loss(LOGITS, LABELS, OWN)) == pytest.approx(cross_entropy + 1 - dice, abs=1e-6)


def test_exclusion_loss_by_hand() -> None:
    # The unknown class has 1/5 where the known class is (one pixel), and 5/8 elsewhere.
    dice = 2 * (1 / 5) / (1 / 5 + 5 / 8 + 1 + DICE_SMOOTHING_PIXELS)
    assert float(exclusion_loss(LOGITS, LABELS)) == pytest.approx(dice + math.log(1 + 1 / 5), abs=1e-6)


def test_loss_of_overlapping_classes_by_hand() -> None:
    # Sigmoid of the annotated class alone: 3/4 in pixel 0, which shows it, and 2/3 in pixel 1, which does not.
    cross_entropy = (-math.log(3 / 4) - math.log(1 / 3)) / 2
    dice = (2 * 3 / 4 + DICE_SMOOTHING_PIXELS) / (3 / 4 + 2 / 3 + 1 + DICE_SMOOTHING_PIXELS)
    assert float(overlapping_loss(LOGITS, LABELS, OWN)) == pytest.approx(cross_entropy + 1 - dice, abs=1e-6)


def test_background_for_what_is_not_annotated_by_hand() -> None:
    # Exclusive: pixel 1 is background alone, 1 of 8; the second class has Dice 1 / (1/5 + 5/8 + 1), for it is nowhere.
    cross_entropy = (-math.log(3 / 5) - math.log(1 / 8)) / 2
    first = (2 * 3 / 5 + DICE_SMOOTHING_PIXELS) / (3 / 5 + 2 / 8 + 1 + DICE_SMOOTHING_PIXELS)
    second = DICE_SMOOTHING_PIXELS / (1 / 5 + 5 / 8 + DICE_SMOOTHING_PIXELS)
    expected = cross_entropy + 1 - (first + second) / 2
    assert float(exclusive_loss_over_all_classes(LOGITS, LABELS, OWN)) == pytest.approx(expected, abs=1e-6)
    # Overlapping: the second class has a sigmoid of 1/2 and 5/6, and both entries count as absent.
    entropy = -(math.log(3 / 4) + math.log(1 / 3) + math.log(1 / 2) + math.log(1 / 6)) / 4
    first = (2 * 3 / 4 + DICE_SMOOTHING_PIXELS) / (3 / 4 + 2 / 3 + 1 + DICE_SMOOTHING_PIXELS)
    second = DICE_SMOOTHING_PIXELS / (1 / 2 + 5 / 6 + DICE_SMOOTHING_PIXELS)
    expected = entropy + 1 - (first + second) / 2
    assert float(overlapping_loss_over_all_classes(LOGITS, LABELS, OWN)) == pytest.approx(expected, abs=1e-6)


def test_conditional_distillation_by_hand() -> None:
    # Temperature 1. The teacher sees the own class in neither pixel, and the label shows it in pixel 0, which is left
    # out. In pixel 1 the probabilities given that it is not there: background 1/6 and the other class 5/6 of the
    # student; 1/3 and 2/3 of the teacher, whose exp logits are 0.5 and 2.
    teacher = torch.tensor([[[[0.5, 0.5]], [[1.0, 2.0]]]]).log()
    background = (2 * (1 / 6) * (1 / 3) + DICE_SMOOTHING_PIXELS) / (1 / 6 + 1 / 3 + DICE_SMOOTHING_PIXELS)
    other = (2 * (5 / 6) * (2 / 3) + DICE_SMOOTHING_PIXELS) / (5 / 6 + 2 / 3 + DICE_SMOOTHING_PIXELS)
    distance = conditional_distillation_loss(LOGITS, teacher, LABELS, OWN, 1.0)
    assert float(distance) == pytest.approx(1 - (background + other) / 2, abs=1e-6)


def test_a_pixel_in_which_the_teacher_sees_an_own_class_is_left_out() -> None:
    teacher = torch.tensor([[[[0.5, 4.0]], [[1.0, 2.0]]]]).log()  # the own class is the highest in pixel 1
    distance = conditional_distillation_loss(LOGITS, teacher, LABELS, OWN, 1.0)
    assert float(distance) == 0


def test_distillation_of_overlapping_classes_by_hand() -> None:
    teacher = torch.tensor([[[[9.0, 9.0]], [[1 / 3, 4.0]]]]).log()  # sigmoid of the other class: 1/4 and 4/5
    dice = (2 * (1 / 2 * 1 / 4 + 5 / 6 * 4 / 5) + DICE_SMOOTHING_PIXELS) / (
        1 / 2 + 5 / 6 + 1 / 4 + 4 / 5 + DICE_SMOOTHING_PIXELS
    )
    assert float(independent_distillation_loss(LOGITS, teacher, OWN, 1.0)) == pytest.approx(1 - dice, abs=1e-6)


@pytest.mark.parametrize(("task", "missing"), SEGMENTATION_LOSSES)
def test_volumes_have_the_loss_of_their_voxels(task: str, missing: str) -> None:
    loss = SEGMENTATION_LOSSES[task, missing]  # type: ignore[index]
    torch.testing.assert_close(loss(volume(LOGITS), volume(LABELS), OWN), loss(LOGITS, LABELS, OWN))


@pytest.mark.parametrize("task", ["segmentation", "exclusive_segmentation"])
def test_where_all_is_annotated_missing_labels_count_for_nothing(task: str) -> None:
    labels = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    masked, negative = (SEGMENTATION_LOSSES[task, missing] for missing in ("masked", "negative"))  # type: ignore[index]
    assert torch.equal(masked(LOGITS, labels, BOTH), negative(LOGITS, labels, BOTH))


@pytest.mark.parametrize("task", ["segmentation", "exclusive_segmentation"])
def test_a_batch_without_any_label_teaches_nothing(task: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    value = SEGMENTATION_LOSSES[task, "masked"](logits, torch.full_like(LABELS, NAN), OWN)  # type: ignore[index]
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_an_overlapping_class_that_is_not_annotated_has_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    overlapping_loss(logits, LABELS, OWN).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[:, 0].abs().min() > 0
    assert not logits.grad[:, 1].any()


def test_the_marginal_loss_prefers_neither_background_nor_an_unknown_class() -> None:
    # In pixel 1 the background has 1 and the unknown class 5 of 8. With 1 and 11 of 16 their share is the same.
    shifted = torch.tensor([[[[3.0, 4.0]], [[1.0, 11.0]]]]).log()
    torch.testing.assert_close(marginal_loss(shifted, LABELS, OWN), marginal_loss(LOGITS, LABELS, OWN))


def test_the_partial_loss_takes_labels_of_pixels_as_it_is() -> None:
    expected = (-math.log(3 / 4) - math.log(1 / 3)) / 2
    assert float(partial_loss(LOGITS, LABELS, OWN)) == pytest.approx(expected, abs=1e-6)


def test_the_dice_loss_against_monai() -> None:
    monai_losses = pytest.importorskip("monai.losses")
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 2, 5, 7, generator=generator)
    labels = (torch.rand(3, 2, 5, 7, generator=generator) < 0.3).float()
    theirs = monai_losses.DiceLoss(
        sigmoid=True, batch=True, smooth_nr=DICE_SMOOTHING_PIXELS, smooth_dr=DICE_SMOOTHING_PIXELS
    )
    torch.testing.assert_close(dice_loss_of_known_pixels(logits.sigmoid(), labels), theirs(logits, labels))
