import pytest
from pydantic import ValidationError

from common.models.zoo.spec import ModelSpec


def test_all_faults_are_reported_at_once() -> None:
    fields = {"architecture": "tiny_cnn", "channels": 1, "image_size": 8, "mean": [0.5, 0.5], "colour": True}
    with pytest.raises(ValidationError) as refused:
        ModelSpec.model_validate(fields)
    assert {fault["loc"] for fault in refused.value.errors()} == {("image_size",), ("mean",), ("colour",)}


def test_normalisation_follows_the_architecture_where_it_is_not_given() -> None:
    lite = ModelSpec(architecture="efficientnet_lite0", image_size=32).normalisation
    assert lite.mean == (127 / 255,) * 3
    assert lite.std == (128 / 255,) * 3
    grey = ModelSpec(architecture="tiny_cnn", image_size=16, channels=1, mean=(0.25,)).normalisation
    assert (grey.mean, grey.std) == ((0.25,), (0.5,))
