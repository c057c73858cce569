"""Data sets without files: scikit-learn's handwritten digits (Alpaydin & Kaynak, UCI), and synthetic radiographs.

The synthetic radiographs (phantoms) are chest images that a program draws, with nine visible findings. They show no
patient and allow no medical conclusion. With them demos and tests run without files, and with difficulties of real
images: several findings in an image, correlated findings (heart failure causes a wide heart, oedema and effusions),
small findings, varying pose, exposure and noise.

Coordinates x and y run from -1 to 1 over the image, y downwards; the patient's left is at positive x, as on a viewer.
All arrays are float32 ``(batch, size, size)``; anatomy and findings are ``(batch, 1, 1)``.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.image_set import DatasetSplits, ImageSet, make_placeholder_patient_names
from polyclinic.data.base.spec import DigitsDatasetSpec, PhantomDatasetSpec
from polyclinic.data.base.splits import split_images_by_patient
from polyclinic.data.images.reading import resize_images


def load_digits_dataset(spec: DigitsDatasetSpec) -> DatasetSplits:
    """Load the 1,797 digits as 8x8 images in 0..255, split 70/10/20; each image counts as one patient."""
    images, digits = _load_digit_images_and_labels(spec.image_size)
    everything = ImageSet(
        stored=images,
        labels=np.asarray(digits[:, None] == np.arange(10), dtype=np.float32),
        class_names=tuple("0123456789"),
        patients=make_placeholder_patient_names(len(images)),
        sources=np.full(len(images), ""),
    )
    return split_images_by_patient(everything, spec.split_seed)


@functools.lru_cache(maxsize=1)
def _load_digit_images_and_labels(size: int | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images of handwritten digits, resized, and their digits; the result is cached in this process."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():  # read directly, because importing scikit-learn takes a second
        table = np.loadtxt(file, delimiter=",")  # (1797, 65): 64 pixels and the digit
    else:  # a release that keeps the file elsewhere
        from sklearn.datasets import load_digits as read_digits

        digits = read_digits()
        table = np.column_stack([digits.data, digits.target])
    pixels = table[:, :-1].reshape(-1, 8, 8)
    images = resize_images(np.round(pixels * (255 / 16)).astype(np.uint8), size, "pad")
    images.flags.writeable = False
    return images, table[:, -1].astype(np.int64)


Plane = NDArray[np.floating[Any]]
RandomGenerator = np.random.Generator

_PREVALENCE = {
    "Cardiomegaly": 0.15,
    "Consolidation": 0.22,
    "Device": 0.25,
    "Edema": 0.12,
    "Effusion": 0.15,
    "Emphysema": 0.18,
    "Mass": 0.17,
    "Nodule": 0.25,
    "Pneumothorax": 0.18,
}
PHANTOM_CLASSES = tuple(_PREVALENCE)
_HEART_FAILURE_PREVALENCE = 0.15
_PREVALENCE_WITH_HEART_FAILURE = {"Cardiomegaly": 0.75, "Edema": 0.7, "Effusion": 0.6, "Device": 0.45}
_IMAGES_PER_BATCH = 100


def load_phantom_dataset(spec: PhantomDatasetSpec) -> DatasetSplits:
    """Draw synthetic radiographs, with 1 to 3 images per patient, and split them by patient."""

    # The order of the random draws determines the images: do not change it.
    return split_images_by_patient(
        draw_phantom_images(spec.images, spec.image_size, np.random.default_rng(spec.seed)), spec.split_seed
    )


def draw_phantom_images(count: int, size: int, random: RandomGenerator) -> ImageSet:
    """Draw ``count`` synthetic radiographs ``(count, size, size)`` with labels for nine findings."""
    patient = np.repeat(np.arange(count), random.integers(1, 4, size=count))[:count]
    # In patients drawn to have heart failure, some findings are more frequent.
    failing = (random.random(patient.max() + 1) < _HEART_FAILURE_PREVALENCE)[patient]
    columns = []
    for name, prevalence in _PREVALENCE.items():
        chance = np.where(failing, _PREVALENCE_WITH_HEART_FAILURE.get(name, prevalence), prevalence)
        columns.append(random.random(len(patient)) < chance)
    findings = np.stack(columns, axis=1).astype(np.float32)  # (count, classes)
    anatomy = PhantomAnatomy.draw_patient_anatomies(patient, random)
    batches = [slice(start, start + _IMAGES_PER_BATCH) for start in range(0, count, _IMAGES_PER_BATCH)]
    images = [_render_phantom_images(findings[batch], anatomy.select_rows(batch), size, random) for batch in batches]
    return ImageSet(
        stored=np.concatenate(images),
        labels=findings,
        class_names=PHANTOM_CLASSES,
        patients=np.char.add("phantom-", np.char.zfill(patient.astype(np.str_), 6)),
        sources=np.full(count, "phantom"),
    )


@dataclass(frozen=True)
class PhantomAnatomy:
    """Individual anatomy of each image's patient, without findings; each array is ``(n, 1, 1)``.

    Attributes:
        width: Half the width of the thorax.
        lung_height: Half the height of the lungs.
        heart: Half the width of the heart.
        diaphragm: y coordinate of the domes of the diaphragm.
        rib_spacing: Ribs per unit of y.
    """

    width: Plane
    lung_height: Plane
    heart: Plane
    diaphragm: Plane
    rib_spacing: Plane

    @classmethod
    def draw_patient_anatomies(cls, patient: NDArray[np.intp], random: RandomGenerator) -> "PhantomAnatomy":
        """Draw one anatomy per patient, and repeat it for each image of the patient."""

        def draw_per_patient(low: float, high: float) -> Plane:
            values = random.uniform(low, high, size=int(patient.max()) + 1)[patient]
            return values.astype(np.float32).reshape(-1, 1, 1)

        return cls(
            width=draw_per_patient(0.8, 0.92),
            lung_height=draw_per_patient(0.66, 0.76),
            heart=draw_per_patient(0.19, 0.27),
            diaphragm=draw_per_patient(0.45, 0.64),
            rib_spacing=draw_per_patient(3.6, 4.6),
        )

    def select_rows(self, batch: slice) -> "PhantomAnatomy":
        """Return the anatomy of the images in a slice."""
        return PhantomAnatomy(**{field.name: getattr(self, field.name)[batch] for field in fields(self)})


@dataclass(frozen=True)
class PhantomScene:
    """Coordinates and random numbers for drawing one batch of images.

    Attributes:
        x: Horizontal coordinate of each pixel relative to the shifted and rotated patient, growing to the right.
        y: Vertical coordinate of each pixel in the same way, growing downwards.
        lungs: Fraction of air in each pixel, 0 to 1.
        draw: Draws a uniform number per image between two bounds, ``(batch, 1, 1)``.
        texture: Draws smooth noise with mean 0 and deviation 1, given the number of grains along a side.
    """

    x: Plane
    y: Plane
    lungs: Plane
    draw: Callable[[float, float], Plane]
    texture: Callable[[int], Plane]

    def draw_body_side(self) -> Plane:
        """Draw a side of the body per image: -1 (left in the image) or 1."""
        return np.where(self.draw(-1, 1) < 0, np.float32(-1), np.float32(1))


def _render_phantom_images(
    findings: NDArray[np.float32], anatomy: PhantomAnatomy, size: int, random: RandomGenerator
) -> NDArray[np.uint8]:
    """Render a batch of images: body, lungs, lung findings, bones, heart, nodules, effusion, device and noise."""
    count = len(findings)
    has = {name: findings[:, column].reshape(-1, 1, 1) for column, name in enumerate(PHANTOM_CLASSES)}

    def draw_uniform(low: float, high: float) -> Plane:
        return random.uniform(low, high, size=(count, 1, 1)).astype(np.float32)

    def draw_smooth_noise(grains: int) -> Plane:
        # Random values on a coarse grid, interpolated linearly by two matrix products.
        grid = random.standard_normal((count, grains + 1, grains + 1), dtype=np.float32)
        distance = np.linspace(0, grains, size, dtype=np.float32)[:, None] - np.arange(grains + 1, dtype=np.float32)
        weights = np.maximum(1 - np.abs(distance), 0)  # (size, grains + 1)
        return np.asarray(1.5 * (weights @ grid @ weights.T), dtype=np.float32)

    # Coordinates that are slightly shifted, rotated and scaled at random for each image.
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    column, row = axis - draw_uniform(-0.06, 0.06), axis[:, None] - draw_uniform(-0.05, 0.05)
    turn, scale = draw_uniform(-0.07, 0.07), draw_uniform(0.93, 1.07)
    x, y = (np.cos(turn) * column + np.sin(turn) * row) * scale, (np.cos(turn) * row - np.sin(turn) * column) * scale
    emphysema = has["Emphysema"] * draw_uniform(0.2, 0.8)
    scene = PhantomScene(x, y, _draw_lungs(x, y, anatomy, emphysema), draw_uniform, draw_smooth_noise)
    body = _compute_smooth_step(1 - np.square(np.square(x / anatomy.width)) - np.abs(np.minimum(y + 0.05, 0)) ** 6, 6)
    density = 0.62 * body
    density -= scene.lungs * (draw_uniform(0.31, 0.4) + 0.12 * emphysema)
    density = _draw_vessels_and_lung_findings(density, scene, has, emphysema)
    density += body * _draw_bones_and_heart(scene, anatomy, has["Cardiomegaly"], emphysema)
    nodules = has["Nodule"] * _draw_round_shadow(scene, 0.06, 0.085, 0.3)
    density += nodules + has["Mass"] * _draw_round_shadow(scene, 0.15, 0.22, 0.3)
    density = _draw_effusion_and_device(density, scene, anatomy, has, body)
    grain = random.standard_normal(density.shape, dtype=np.float32)
    exposed = np.clip(density, 0, 1.2) ** draw_uniform(0.8, 1.25) * draw_uniform(0.85, 1.1) + draw_uniform(-0.02, 0.06)
    exposed += draw_uniform(0.015, 0.045) * grain + 0.012 * draw_smooth_noise(3)  # scatter and noise
    return np.asarray(np.round(255 * np.clip(exposed, 0, 1)), dtype=np.uint8)


def _compute_smooth_step(signed: Plane, sharpness: float) -> Plane:
    """Return 1 where ``signed`` is positive and 0 where it is negative, with a smooth transition."""
    return np.asarray(1 / (1 + np.exp(np.clip(-sharpness * signed, -30, 30))), dtype=np.float32)


def _draw_lungs(x: Plane, y: Plane, anatomy: PhantomAnatomy, emphysema: Plane) -> Plane:
    """Draw the lungs as half-ellipses; emphysema widens them, and lowers and flattens the diaphragm."""
    center = 0.49 * anatomy.width
    from_center = (np.abs(x) - center) / (0.36 * anatomy.width * (1 + 0.06 * emphysema))
    outline = 1 - np.abs(from_center) ** 2.4 - np.abs((y + 0.12) / anatomy.lung_height) ** 2.4
    outline -= 0.35 * np.clip(-y - 0.35, 0, 1) * (1 + from_center)
    dome = anatomy.diaphragm - 0.05 + 0.16 * emphysema + (0.22 - 0.2 * emphysema) * from_center**2
    dome -= 0.05 * (x < 0) * (1 - emphysema)
    return _compute_smooth_step(outline, 9) * _compute_smooth_step(dome - y, 28)


def _draw_bones_and_heart(scene: PhantomScene, anatomy: PhantomAnatomy, cardiomegaly: Plane, emphysema: Plane) -> Plane:
    """Draw ribs (arcs that descend towards the sides), clavicles, spine, great vessels and heart.

    Cardiomegaly widens the heart, and emphysema narrows it.
    """
    x, y = scene.x, scene.y
    phase = anatomy.rib_spacing * (y - 0.42 * np.abs(x) ** 1.5)
    arcs = 0.055 * np.clip(np.cos(2 * np.pi * phase) - 0.25, 0, 1) * _compute_smooth_step(np.abs(x) - 0.12, 30)
    clavicles = 0.08 * np.exp(-(((y + 0.68 + 0.12 * np.abs(x)) / 0.035) ** 2))
    ribs = arcs * _compute_smooth_step(0.55 - y, 10) + clavicles
    half_width = 0.13 + 0.03 * np.sin(5 * y)
    mediastinum = 0.22 * np.exp(-np.square(np.square(x / half_width))) * (1 - 0.5 * _compute_smooth_step(y - 0.6, 8))
    width = anatomy.heart * (1 + scene.draw(0.18, 0.5) * cardiomegaly) * (1 - 0.14 * emphysema)
    across = (x - 0.09 - 0.35 * (width - 0.22)) / (1.25 * width)
    along = (y - anatomy.diaphragm + 0.22 - 0.06 * emphysema) / (0.3 + 0.25 * (width - 0.22))
    heart = _compute_smooth_step(1 - across**2 - along**2 - 0.5 * across * along, 7)
    return np.asarray(ribs + (mediastinum + heart * (0.03 + 0.29 * scene.lungs)))


def _draw_round_shadow(scene: PhantomScene, min_radius: float, max_radius: float, brightness: float) -> Plane:
    """Draw a round shadow at a random position in a lung; the rim of a large shadow is slightly irregular.

    Args:
        brightness: Density of the shadow, before a random variation.
    """
    radius = scene.draw(min_radius, max_radius)
    x, y = scene.draw_body_side() * scene.draw(0.34, 0.6), scene.draw(-0.5, 0.25)
    distance: Plane = np.hypot(scene.x - x, scene.y - y) * (1 + radius * scene.texture(8))
    disc = _compute_smooth_step(1 - distance / radius, 7) * (0.25 + 0.75 * scene.lungs)
    return scene.draw(0.75, 1.1) * brightness * disc


def _draw_vessels_and_lung_findings(
    density: Plane, scene: PhantomScene, has: Mapping[str, Plane], emphysema: Plane
) -> Plane:
    """Return the density with vessels, edema, consolidation and pneumothorax drawn into the lungs.

    Args:
        has: Finding -> ``(batch, 1, 1)``: 1 for each image with the finding, else 0.
        emphysema: ``(batch, 1, 1)``, severity of emphysema from 0; it makes the vessels thinner.
    """
    x, y = scene.x, scene.y
    # The vessels are densest beside the upper border of the heart.
    hila = np.exp(-(((np.abs(x) - 0.24) / 0.17) ** 2) - ((y + 0.05) / 0.26) ** 2)
    vessels = scene.lungs * (0.035 * scene.texture(16) + 0.05 * hila)
    vessels *= 1 - 0.6 * emphysema
    density = density + vessels
    # Edema: butterfly-shaped haze around both hila.
    wings = np.exp(-(((np.abs(x) - 0.3) / 0.24) ** 2) - ((y + 0.02) / 0.36) ** 2)
    haze = wings * np.clip(1 + 0.25 * scene.texture(14), 0.3, 1.7)
    haze = has["Edema"] * (scene.draw(0.07, 0.2) * scene.lungs * haze)
    # Consolidation: a patchy white area with blurred edges in one lung.
    center_x, center_y = scene.draw_body_side() * scene.draw(0.36, 0.52), scene.draw(-0.3, 0.3)
    area = np.exp(-(((x - center_x) / scene.draw(0.2, 0.28)) ** 2) - ((y - center_y) / scene.draw(0.16, 0.26)) ** 2)
    patches: Plane = np.clip(0.75 + 0.5 * scene.texture(11), 0.1, 1.4)
    density += haze + has["Consolidation"] * (scene.draw(0.3, 0.42) * scene.lungs * area * patches)
    # Pneumothorax: air without vessels beside a collapsed lung, and the thin white line of its pleura.
    side = scene.draw_body_side()
    across, along = (side * x - 0.3) / scene.draw(0.26, 0.36), (y - 0.25) / scene.draw(0.5, 0.8)
    inside = 1 - across**2 - along**2
    here = _compute_smooth_step(side * x - 0.1, 30) * scene.lungs
    rim = scene.draw(0.04, 0.14) * np.exp(-((inside / 0.14) ** 2)) * here * _compute_smooth_step(0.35 - y, 12)
    density -= has["Pneumothorax"] * (here * _compute_smooth_step(-inside, 12)) * (0.6 * vessels + 0.06)
    density += has["Pneumothorax"] * rim
    return density


def _draw_effusion_and_device(
    density: Plane, scene: PhantomScene, anatomy: PhantomAnatomy, has: Mapping[str, Plane], body: Plane
) -> Plane:
    """Return the density with pleural effusion and a lead or catheter drawn over the body.

    Args:
        has: Finding -> ``(batch, 1, 1)``: 1 for each image with the finding, else 0.
        body: Fraction of each pixel that is inside the body, 0 to 1.
    """
    # Effusion: fluid above one side of the diaphragm, whose level rises towards the chest wall (meniscus).
    outward = scene.draw_body_side() * scene.x
    lateral = np.clip((outward - 0.15) / 0.6, 0, 1.2)
    level = anatomy.diaphragm - scene.draw(0.0, 0.26) - 0.2 * lateral**3
    fluid = _compute_smooth_step(scene.y - level, 22) * _compute_smooth_step(outward - 0.06, 25)
    fluid = has["Effusion"] * (fluid * _compute_smooth_step(anatomy.diaphragm + 0.3 - scene.y, 12)) * body
    density = density + fluid * np.maximum(0.68 - density, 0)
    # Device: a thin bright line from one shoulder down to the heart.
    side, end = scene.draw_body_side(), scene.draw(-0.05, 0.35)
    start = scene.draw(0.4, 0.6)
    way = np.clip((scene.y + 0.75) / (end + 0.75), 0, 1)
    line = side * (start * (1 - way) ** 2 + scene.draw(-0.04, 0.06) * way)
    slope = side * 2 * start * (1 - way) / (end + 0.75)
    distance: Plane = np.abs(scene.x - line) / np.sqrt(1 + slope**2)
    on_way = _compute_smooth_step(scene.y + 0.75, 60) * _compute_smooth_step(end - scene.y, 60)
    line_density: Plane = scene.draw(0.06, 0.2) * np.exp(-((distance / 0.022) ** 2))
    return density + has["Device"] * body * (line_density * on_way)
