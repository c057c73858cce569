"""Class names, in label order, of public npz files without any: MedMNIST 2D (Yang et al., 2023), MNIST, CIFAR-10.

ChestMNIST's names are those of :data:`common.data.tables.presets.NIH_CLASSES`, shared with other chest sets.
"""

import re

_ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
_CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": (
        "Atelectasis",
        "Cardiomegaly",
        "Pleural Effusion",
        "Infiltration",
        "Mass",
        "Nodule",
        "Pneumonia",
        "Pneumothorax",
        "Consolidation",
        "Edema",
        "Emphysema",
        "Fibrosis",
        "Pleural Thickening",
        "Hernia",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "collecting duct, connecting tubule",
        "distal convoluted tubule",
        "glomerular endothelial cells",
        "interstitial endothelial cells",
        "leukocytes",
        "podocytes",
        "proximal tubule segments",
        "thick ascending limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
    "mnist": tuple("0123456789"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


def known_classes(stem: str) -> tuple[str, ...]:
    """Return the class names of a file by its stem (``octmnist``, ``octmnist_64``, ``cifar10_jpeg``), or none."""
    return _CLASSES.get(re.sub(r"(_\d+|_jpeg)$", "", stem.lower()), ())
