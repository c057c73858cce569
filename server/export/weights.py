"""flwr-sim weights: local files of pre-trained weights, so that no run ever downloads any."""

from pathlib import Path

from common.errors import BadInput, Fault
from common.models.weights import convert_efficientnet_lite0, convert_torchvision

FROM_TORCHVISION = ("densenet121", "resnet18", "vgg11")


def make_weights(architecture: str, checkpoint: Path | None, destination: Path) -> str:
    """Convert weights into a safetensors file; return its SHA-256.

    Raises:
        BadInput: If the architecture has no known source, a file is missing, or the destination exists.
    """
    if destination.exists():
        raise BadInput(
            [Fault(str(destination), "exists, and nothing is written over.", "Remove it, or name another file.")]
        )
    if architecture == "efficientnet_lite0" and checkpoint is None:
        return convert_efficientnet_lite0(destination)
    if architecture in FROM_TORCHVISION and checkpoint is not None:
        return convert_torchvision(architecture, checkpoint, destination)  # type: ignore[arg-type]
    problem = f'there is no source of weights for "{architecture}" {"with" if checkpoint else "without"} --checkpoint.'
    remedy = 'Without --checkpoint: "efficientnet_lite0". With torchvision\'s file: "densenet121", "resnet18", "vgg11".'
    raise BadInput([Fault("--architecture", problem, remedy)])
