"""Class names of public data sets, and checks of the class names in a configuration file.

Public npz files do not contain class names. This module has the class names of MedMNIST 2D (Yang et al., 2023), MNIST
and CIFAR-10.
"""

import re
from collections.abc import Sequence

from polyclinic.common.errors import Fault, quote_names, suggest_nearest_name

NAME_CLASSES_REMEDY = (
    "in Python dataset=pc.LabelledImages(dataset, class_names=NAMES), of parts "
    "dataset={part: pc.LabelledImages(data, class_names=NAMES) for part, data in parts.items()}"
)
"""Advice on how to name the classes of a data set, for error messages."""


def find_unknown_class_faults(where: str, names: Sequence[str], class_names: Sequence[str]) -> list[Fault]:
    """Return a fault for each name that is not a class of the data.

    Args:
        where: The configuration key of the list ``names``.
        class_names: The classes of the data.
    """
    faults = list[Fault]()
    for index, name in enumerate(names):
        if name not in class_names:
            problem = f'"{name}" is not a class of the data, whose classes are {quote_names(class_names)}.'
            faults.append(Fault(f"{where}[{index}]", problem, suggest_nearest_name(name, class_names)))
    return faults


def find_numbered_class_faults(where: str, names: Sequence[str], class_names: Sequence[str]) -> list[Fault]:
    """Return a fault if the classes of the data have numbers as names, but no entry of ``names`` is such a number.

    Args:
        where: The configuration key of ``names``.
        class_names: The classes of the data.
    """
    is_numbered = list(class_names) == [str(number) for number in range(len(class_names))]
    if not is_numbered or not names or set(names) & set(class_names):
        return []
    problem = f'names {quote_names(names)}, and the classes of the data have numbers: "0" to "{len(class_names) - 1}".'
    remedy = (
        f"List numbers. Or name the classes in the order of their numbers: {NAME_CLASSES_REMEDY}; for an npz file by "
    )
    remedy += "data.classes."
    return [Fault(where, problem, remedy)]


def find_repeated_name_faults(where: str, names: Sequence[str]) -> list[Fault]:
    """Return a fault if names occur more than once.

    Args:
        where: The configuration key of the list ``names``.
    """
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [Fault(where, f"{quote_names(repeated)} stands there more than once.")] if repeated else []


def _split_at_semicolons(text: str) -> tuple[str, ...]:
    return tuple(text.split("; "))


_ORGAN_CLASSES = _split_at_semicolons(
    "bladder; femur-left; femur-right; heart; kidney-left; kidney-right; liver; lung-left; lung-right; pancreas; spleen"
)
_CLASSES_OF_PUBLIC_FILES: dict[str, tuple[str, ...]] = {
    "pathmnist": _split_at_semicolons(
        "adipose; background; debris; lymphocytes; mucus; smooth muscle; normal colon mucosa; cancer-associated "
        "stroma; colorectal adenocarcinoma epithelium"
    ),
    "chestmnist": _split_at_semicolons(
        "Atelectasis; Cardiomegaly; Pleural Effusion; Infiltration; Mass; Nodule; Pneumonia; Pneumothorax; "
        "Consolidation; Edema; Emphysema; Fibrosis; Pleural Thickening; Hernia"
    ),
    "dermamnist": _split_at_semicolons(
        "actinic keratoses and intraepithelial carcinoma; basal cell carcinoma; benign keratosis-like lesions; "
        "dermatofibroma; melanoma; melanocytic nevi; vascular lesions"
    ),
    "octmnist": _split_at_semicolons("choroidal neovascularization; diabetic macular edema; drusen; normal"),
    "pneumoniamnist": _split_at_semicolons("normal; pneumonia"),
    "retinamnist": _split_at_semicolons("grade 0; grade 1; grade 2; grade 3; grade 4"),
    "breastmnist": _split_at_semicolons("malignant; normal or benign"),
    "bloodmnist": _split_at_semicolons(
        "basophil; eosinophil; erythroblast; immature granulocytes; lymphocyte; monocyte; neutrophil; platelet"
    ),
    "tissuemnist": _split_at_semicolons(
        "collecting duct, connecting tubule; distal convoluted tubule; glomerular endothelial cells; interstitial "
        "endothelial cells; leukocytes; podocytes; proximal tubule segments; thick ascending limb"
    ),
    "organamnist": _ORGAN_CLASSES,
    "organcmnist": _ORGAN_CLASSES,
    "organsmnist": _ORGAN_CLASSES,
    "mnist": tuple("0123456789"),
    "cifar10": _split_at_semicolons("airplane; automobile; bird; cat; deer; dog; frog; horse; ship; truck"),
}


def get_public_dataset_classes(stem: str) -> tuple[str, ...]:
    """Return the class names of a public npz file, given its stem: ``octmnist``, ``octmnist_64``, ``cifar10_jpeg``.

    The result is empty for unknown files.
    """
    return _CLASSES_OF_PUBLIC_FILES.get(re.sub(r"(_\d+|_jpeg)$", "", stem.lower()), ())


NIH_CLASSES = _split_at_semicolons(
    "Atelectasis; Cardiomegaly; Consolidation; Edema; Emphysema; Fibrosis; Hernia; Infiltration; Mass; Nodule; "
    "Pleural Effusion; Pleural Thickening; Pneumonia; Pneumothorax"
)
CHEXPERT_CLASSES = _split_at_semicolons(
    "Atelectasis; Cardiomegaly; Consolidation; Edema; Enlarged Cardiomediastinum; Fracture; Lung Lesion; Lung "
    "Opacity; Pleural Effusion; Pleural Other; Pneumonia; Pneumothorax; Support Devices"
)
MIMIC_CLASSES = tuple(sorted({*NIH_CLASSES, *CHEXPERT_CLASSES}))
