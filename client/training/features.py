"""Cache of the features of a frozen backbone: each image's features are computed once, and rounds train on them.

Features are computed as in evaluation, in batches of :data:`FEATURE_BATCH_SIZE` images in the site's own order. They
have the same bits in every round, and after every restart on the same machine.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor, nn

from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.models.network import SplitNetwork, apply_doubling_single_image, autocast
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.security.identity import derive_storage_key
from polyclinic.common.system.files import write_atomically
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.pixels import ImageTensors
from polyclinic.strategies.local.arithmetic import read_number_format
from polyclinic.strategies.local.site_method import SiteMethod

NONCE_BYTES = 12
FEATURE_BATCH_SIZE = 32
"""Number of images in a batch; a foundation model at 224 pixels takes at least 30 MB for each image."""


class NeckAndHeadOnFeatures(SplitNetwork):
    """The neck and head of a network, with the backbone's features ``(batch, width)`` as input instead of images."""

    def __init__(self, whole: SplitNetwork) -> None:
        super().__init__(whole.spec, whole.class_names, backbone=nn.Identity(), neck=whole.neck, head=whole.head)

    def preprocess_images(self, images: Tensor) -> Tensor:
        """Return the features unchanged, because they need no resizing and no normalisation."""
        return images


def trains_on_cached_features(plan: HospitalPlan, method: SiteMethod) -> bool:
    """Return True if a run trains only on features of a frozen backbone, so that it needs no pixels afterwards."""
    if is_segmentation(plan.model.task):  # the features of each pixel take many times the space of the images
        return False
    return plan.model.backbone_frozen and plan.augmentation == AugmentationSpec() and not method.looks_at_images


@dataclass
class FeatureCache:
    """Cache of a site's features of the latest frozen backbone, in memory and, with a key, encrypted on disk.

    Attributes:
        key: AES-256 key of 32 bytes; None to store nothing on disk.
        durable: Flush files to disk.
    """

    folder: Path
    key: bytes | None
    durable: bool
    _frozen: str = ""
    _parts: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def get_or_compute_features(
        self, network: SplitNetwork, part: str, pixels: ImageTensors, plan: HospitalPlan
    ) -> Tensor:
        """Return the float32 features ``(n, width)`` of one part of the site's data, on the device of its pixels."""
        device = pixels.device.type
        arithmetic = read_number_format(plan.training, device)
        about = f"{plan.model.frozen_sha256} {plan.model.model_dump_json()} {arithmetic} {device}"
        if about != self._frozen:
            self._frozen = about
            self._parts = {}
        if part in self._parts:
            return self._parts[part]

        path = self.folder / f"{part}.features"
        name = ""
        features: Tensor | None = None
        if self.key is not None:
            images = hashlib.sha256()
            for batch in pixels.iterate_batches(FEATURE_BATCH_SIZE):
                images.update(str(tuple(batch.shape)).encode())
                images.update(batch.cpu().contiguous().numpy().tobytes())
            name = hashlib.sha256(f"{about} {part} {images.hexdigest()}".encode()).hexdigest()
            # If the file is missing, damaged, or of other images or another model, the features are computed again.
            with contextlib.suppress(OSError, InvalidTag, ValueError):
                content = path.read_bytes()
                plain = AESGCM(self.key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], name.encode())
                width = int.from_bytes(plain[:8], "little")
                features = torch.from_numpy(np.frombuffer(plain[8:], "<f4").reshape(-1, width).copy())

        if features is None:
            network.backbone.eval()
            computed = []
            for batch in pixels.iterate_batches(FEATURE_BATCH_SIZE):
                with autocast(batch.device, plan.training.precision):
                    inputs = network.preprocess_images(batch.float())
                    computed.append(apply_doubling_single_image(network.backbone, inputs).float())
            features = torch.cat(computed)
            if self.key is not None:
                nonce = os.urandom(NONCE_BYTES)
                width_bytes = features.shape[1].to_bytes(8, "little")
                plain = width_bytes + features.cpu().numpy().astype("<f4").tobytes()
                sealed = AESGCM(self.key).encrypt(nonce, plain, name.encode())
                write_atomically(path, nonce + sealed, durable=self.durable, private=True)

        self._parts[part] = features.to(pixels.device)
        return self._parts[part]


def get_site_feature_cache(site: Site) -> FeatureCache:
    """Return a site's feature cache, which stays in memory as long as the site's images do."""
    identity = site.identity if site.policy.keep_features else None
    key = None if identity is None else derive_storage_key(identity.key, "features")
    features: FeatureCache = site.computed_results_cache.setdefault(
        "features", FeatureCache(site.folder / "features", key, site.durable)
    )
    return features
