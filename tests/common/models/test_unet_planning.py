"""nnU-Net's rules: numbers worked by hand, and the plans that its authors publish for two of their data sets."""

import numpy as np
import pytest

from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.models.zoo.unet_planning import (
    choose_levels,
    choose_target_spacing,
    count_map_values,
    plan_unet,
)

ROOMY = (10_000, 10_000, 10_000)


def test_coarse_axes_are_halved_once_the_others_are_as_coarse() -> None:
    # Voxels 3 x 1 x 1: first the fine axes alone are halved, with flat kernels. Then voxels are 3 x 2 x 2, and all
    # are. 16 x 64 x 64 becomes 16 x 32 x 32, 8 x 16 x 16, 4 x 8 x 8, and 4 x 4 x 4, as no side may fall below 4.
    levels = choose_levels((3, 1, 1), (16, 64, 64))
    assert levels.strides == ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))
    assert levels.kernel_sizes == ((1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    assert levels.divisors == (4, 16, 16)
    assert levels.features == (32, 64, 128, 256, 320)


def test_an_axis_alone_is_halved_only_if_six_are_left() -> None:
    assert choose_levels((1, 1, 1), (4, 4, 11)).strides == ((1, 1, 1),)
    assert choose_levels((1, 1, 1), (4, 4, 12)).strides == ((1, 1, 1), (1, 1, 2))


def test_values_of_feature_maps_by_hand() -> None:
    # 2 x 4 x 4: two convolutions down, three layers up, 32 features each: 5 * 32 * 32 = 5120. Below 2 x 2 x 2 with 64
    # features: 2 * 64 * 8 = 1024. Scores of three classes and the background: 4 * 32 = 128.
    assert count_map_values((2, 4, 4), ((1, 1, 1), (1, 2, 2)), classes=3) == 5120 + 1024 + 128


def test_the_published_plan_of_the_hippocampus() -> None:
    # Decathlon, Task 4: 260 volumes with a median of 36 x 50 x 35 voxels of 1 mm, two classes. 5 % of all voxels are
    # 9.1 patches, so that a batch has 9 though more would fit.
    plan = plan_unet((1, 1, 1), (36, 50, 35), ROOMY, volumes=260, classes=2)
    assert (plan.patch_size, plan.batch_size) == ((40, 56, 40), 9)
    assert plan.levels.strides == ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2))


def test_the_published_plan_of_the_liver() -> None:
    plan = plan_unet((1.0, 0.7676, 0.7676), (482, 512, 512), ROOMY, volumes=131, classes=2)
    assert (plan.patch_size, plan.batch_size) == ((128, 128, 128), 2)
    assert plan.levels.divisors == (32, 32, 32)


@pytest.mark.parametrize("stored", [(30, 48, 33), (15, 9, 17), (4, 8, 300)])
def test_no_patch_is_longer_than_the_volumes_in_the_cache(stored: tuple[int, int, int]) -> None:
    plan = plan_unet((1, 1, 1), (36, 50, 35), stored, volumes=260, classes=2)
    sides, divisors = np.array(plan.patch_size), np.array(plan.levels.divisors)
    assert (sides <= stored).all()
    assert not (sides % divisors).any()
    assert plan.levels == choose_levels((1, 1, 1), plan.patch_size)


def test_less_memory_gives_smaller_patches_and_never_fewer_than_two() -> None:
    of = [plan_unet((1, 1, 1), (200, 200, 200), ROOMY, 50, 2, memory_gb=gb) for gb in (24, 8, 2, 1e-6)]
    voxels = [int(np.prod(plan.patch_size)) for plan in of]
    assert voxels == sorted(voxels, reverse=True)
    assert voxels[0] > voxels[2]
    assert [plan.batch_size for plan in of] == [2, 2, 2, 2]
    assert all(side >= 8 for side in of[-1].patch_size)


def test_the_target_spacing_is_the_median() -> None:
    assert choose_target_spacing((2.0, 0.7, 0.7), (1.0, 0.5, 0.5), (100, 500, 500)) == (2.0, 0.7, 0.7)


def test_a_coarse_axis_of_few_slices_gets_finer_voxels_than_the_median() -> None:
    coarse = (10.0, 1.5, 1.5)
    assert choose_target_spacing(coarse, (6.0, 1.2, 1.2), (10, 200, 200)) == (6.0, 1.5, 1.5)
    assert choose_target_spacing(coarse, (6.0, 1.2, 1.2), (80, 200, 200)) == coarse  # it has enough slices
    assert choose_target_spacing(coarse, (1.0, 1.2, 1.2), (10, 200, 200)) == (1.5, 1.5, 1.5)  # no finer than the others
    assert choose_target_spacing((4.0, 1.5, 1.5), (1.0, 1.2, 1.2), (10, 200, 200)) == (4.0, 1.5, 1.5)  # not coarse


LEVELS = {
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}


def spec_of(**more: object) -> ModelSpec:
    form = {"task": "segmentation", "architecture": "monai:DynUNet", "channels": 1, "image_size": [4, 16, 16], **LEVELS}
    return ModelSpec.model_validate(form | more)


def test_the_network_has_the_planned_levels() -> None:
    pytest.importorskip("monai")
    kernels = {
        name: tuple(value.shape[2:])
        for name, value in build_network(spec_of(), ("a",), seed=0).named_parameters()
        if name.endswith("conv1.conv.weight")
    }
    assert kernels["backbone.input_block.conv1.conv.weight"] == (1, 3, 3)
    assert kernels["backbone.bottleneck.conv1.conv.weight"] == (3, 3, 3)


WRONG_LEVELS = [
    {"strides": None},
    {"strides": [[1, 1, 1]] * 4},
    {"strides": [[1, 1, 1]] * 2, "kernel_sizes": [[3, 3, 3]] * 2},
    {"strides": [[1, 1, 1], [1, 2, 2], [3, 2, 2]]},
    {"strides": [[2, 2, 2], [1, 2, 2], [1, 1, 1]]},
    {"strides": [[1, 1], [2, 2], [2, 2]]},
    {"kernel_sizes": [[1, 3, 3], [2, 3, 3], [3, 3, 3]]},
    {"architecture": "monai:UNet"},
]


@pytest.mark.parametrize("wrong", WRONG_LEVELS)
def test_levels_that_fit_no_network_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"strides|kernel_sizes"):
        spec_of(**wrong)


def test_a_model_without_levels_has_the_text_that_it_had() -> None:
    assert not {"strides", "kernel_sizes"} & spec_of(strides=None, kernel_sizes=None).model_dump().keys()
