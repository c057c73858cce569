"""``flwr-sim weights``: convert pre-trained weights into local files, so that no run has to download any."""

from pathlib import Path
from typing import cast

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.zoo.spec import Architecture, is_external_network
from polyclinic.common.system.files import is_file, make_missing_input_fault

TORCHVISION_ARCHITECTURES = ("densenet121", "resnet18", "vgg11")


def convert_pretrained_weights(
    architecture: str, checkpoint: Path | None, destination: Path, image_size: int = 224
) -> str:
    """Convert a checkpoint of pre-trained weights to a safetensors file; return the file's SHA-256.

    Args:
        checkpoint: File of weights in the format of the architecture's library; None only for ``efficientnet_lite0``.
        image_size: ``model.image_size``; needed by networks whose weights depend on it, such as vision transformers.

    Raises:
        BadInput: If the architecture has no known source, a file is missing, or the destination exists.
    """
    if destination.exists():
        remedy = "Remove it, or name another file."
        raise BadInput([Fault(str(destination), "exists, and nothing is written over.", remedy)])
    if architecture == "efficientnet_lite0" and checkpoint is None:
        # Imported here, so that a call with a fault does not wait for the import of torch.
        from polyclinic.common.models.weights import convert_efficientnet_lite0

        return convert_efficientnet_lite0(destination)
    if (architecture in TORCHVISION_ARCHITECTURES or is_external_network(architecture)) and checkpoint is not None:
        if not is_file(checkpoint):
            raise BadInput([make_missing_input_fault(checkpoint)])
        try:
            with checkpoint.open("rb") as file:
                head = file.read(512)
        except OSError as error:
            raise BadInput([Fault(str(checkpoint), f"cannot be read: {error.strerror}.")]) from None
        if checkpoint.suffix == ".safetensors":
            # The first eight bytes hold the length of the JSON header.
            is_readable = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= checkpoint.stat().st_size - 8
        else:
            # torch.save writes a zip file; before release 1.6 it wrote a pickle, before 0.1.10 a tar file.
            is_readable = head.startswith((b"PK\x03\x04", b"\x80")) or head[257:262] == b"ustar"
        if not is_readable:
            remedy = "Name a .pth or .pt file of torch.save, or a .safetensors file."
            raise BadInput([Fault(str(checkpoint), "is no file of tensors.", remedy)])
        from polyclinic.common.models.weights import convert_checkpoint

        return convert_checkpoint(cast(Architecture, architecture), checkpoint, destination, image_size)
    problem = f'there is no source of weights for "{architecture}" {"with" if checkpoint else "without"} --checkpoint.'
    remedy = (
        'Without --checkpoint: "efficientnet_lite0". With the file of its library: "densenet121", "resnet18", "vgg11", '
        '"timm:NAME", "torchvision:NAME", "monai:NAME", "torchxrayvision:densenet121".'
    )
    raise BadInput([Fault("--architecture", problem, remedy)])
