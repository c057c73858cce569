"""flwr-sim weights: local files of pre-trained weights, so that no run ever downloads any."""

from pathlib import Path
from typing import cast

from common.errors import BadInput, Fault
from common.models.zoo.spec import Architecture, is_external
from common.system.files import no_such_file

FROM_TORCHVISION = ("densenet121", "resnet18", "vgg11")


def make_weights(architecture: str, checkpoint: Path | None, destination: Path, image_size: int = 224) -> str:
    """Convert weights into a safetensors file; return its SHA-256.

    Args:
        image_size: As ``model.image_size``; of networks whose weights depend on it, such as vision transformers.

    Raises:
        BadInput: If the architecture has no known source, a file is missing, or the destination exists.
    """
    if destination.exists():
        raise BadInput(
            [Fault(str(destination), "exists, and nothing is written over.", "Remove it, or name another file.")]
        )
    if architecture == "efficientnet_lite0" and checkpoint is None:
        from common.models.weights import convert_efficientnet_lite0  # here: a wrong call does not wait for torch

        return convert_efficientnet_lite0(destination)
    if (architecture in FROM_TORCHVISION or is_external(architecture)) and checkpoint is not None:
        if not checkpoint.is_file():
            raise BadInput([no_such_file(checkpoint)])
        from common.models.weights import convert_checkpoint

        return convert_checkpoint(cast(Architecture, architecture), checkpoint, destination, image_size)
    problem = f'there is no source of weights for "{architecture}" {"with" if checkpoint else "without"} --checkpoint.'
    remedy = (
        'Without --checkpoint: "efficientnet_lite0". With the file of its library: "densenet121", "resnet18", "vgg11", '
        '"timm:NAME", "torchvision:NAME", "monai:NAME", "torchxrayvision:densenet121".'
    )
    raise BadInput([Fault("--architecture", problem, remedy)])
