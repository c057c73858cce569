"""Each remedy in a message about data, networks, losses and metrics is followed, and the values are right.

The second test lists the functions that make such messages: a new one needs a case here, or a reason in
:data:`NOT_TRIED`.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.remedies import data_cases, network_cases
from tests.remedies.cases import Case, read_message

ROOT = Path(__file__).parents[2]
CASES = (*data_cases.CASES, *network_cases.CASES)
PLACES = (
    *("data/images", "data/sources", "data/base", "common/models", "common/metrics"),
    *("data/tables/copies.py", "strategies/local/plugin_calls.py"),
)
"""Folders and files whose refusals are about data, networks, losses and metrics."""
MAKERS = ("Fault", "_make_item_error")
"""Names of calls whose third argument is the remedy."""
_DAMAGED = "a damaged disk or file: the remedy is another copy of it"
_MEMORY = "needs a machine without room: tests of the limits themselves are in tests/data/test_decoded_size.py"
_FILE = "the file of a saved model or of weights is damaged, or another one: the remedy is the right file"
NOT_TRIED = {
    "data/images/pixel_cache.py _make_damaged_cache_error": f"{_DAMAGED}; tests/data/test_store.py removes the folder",
    "data/images/pixel_cache.py open_from_description": "two programs at once; the remedy is to start again",
    "data/images/store.py allocate_picture_array": _MEMORY,
    "data/images/store.py warn_about_cache_errors": _MEMORY,
    "data/images/store.py make_cache_room": _MEMORY,
    "data/sources/collections.py find_label_map_faults": "the remedy is a name of the list in the message, as in "
    "tests/data/test_collections.py",
    "data/sources/collections.py _find_unmasked_collection_faults": "the remedy is files of masks, as in "
    "tests/studies/test_condistfl_files.py",
    "data/sources/plugin.py _take_masks": "each remedy is the form of a call in tests/polyclinic/test_masks.py",
    "data/sources/plugin.py _find_mask_faults": "each remedy is the form of an item in tests/polyclinic/test_masks.py",
    "data/sources/dicomweb.py open_dicomweb_table": "needs a PACS: tests/data/test_dicomweb.py",
    "data/sources/dicomweb.py _find_identifier_faults": "needs a PACS: tests/data/test_dicomweb.py",
    "data/sources/dicomweb.py _locate_pacs_images": "needs a PACS: tests/data/test_dicomweb.py",
    "data/sources/npz.py find_oversized_content_faults": _MEMORY,
    "data/sources/npz_file.py report_npz_damage_as_fault": _DAMAGED,
    "data/base/dark_pictures.py _refuse_one_even_grey": "the files are wrong: the remedy is other files, or a window, "
    "which tests/data/test_grey.py tries",
    "data/base/image_set.py find_missing_mask_faults": "the remedy is files of masks, as in tests/data/test_masks.py",
    "data/base/splits.py split_off_patient_fraction": "too few patients: the remedy is more data",
    "common/models/saved.py load_model": _FILE,
    "common/models/saved.py _build_network_of_size": _FILE,
    "common/models/saved.py read_model_description": _FILE,
    "common/models/weights.py _read_weights_file": _FILE,
    "common/models/weights.py read_weights_file": _FILE,
    "common/models/weights.py _find_weights_hash_faults": _FILE,
    "common/models/weights.py _read_state_dict": _FILE,
    "common/models/zoo/spec.py make_unreadable_model_fault": _FILE,
    "common/models/zoo/networks.py replace_with_group_norm": 'needs a timm network of 20 MB; "batch" is the default',
    "common/models/zoo/registry.py _make_class_map_fault": "the remedy is the network without its last convolution",
    "common/models/zoo/registry.py _build_torchvision": "needs a transformer of 330 MB; 224 pixels are its own size",
}
"""Functions whose remedies no test follows, with the reason."""


@pytest.mark.parametrize("case", CASES, ids=[f"{number} {case.site}" for number, case in enumerate(CASES)])
def test_the_remedy_of_a_refusal_works(case: Case, tmp_path: Path) -> None:
    case.remedy(tmp_path, read_message(case, tmp_path))


def count_remedies(file: Path) -> Counter[str]:
    """Return the number of remedies in each function of a file."""
    counts = Counter[str]()

    def visit(node: ast.AST, function: str) -> None:
        name = node.name if isinstance(node, ast.FunctionDef) else function
        is_fault = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in MAKERS
        if is_fault and len(node.args) > 2 and name not in MAKERS:  # type: ignore[attr-defined]
            counts[f"{file.relative_to(ROOT)} {name}"] += 1
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return counts


def test_each_remedy_has_a_case_or_a_reason() -> None:
    folders = [ROOT / place for place in PLACES]
    files = [file for folder in folders for file in ([folder] if folder.is_file() else folder.rglob("*.py"))]
    remedies = sum(map(count_remedies, files), Counter[str]())
    tried = Counter(case.site for case in CASES)
    assert {
        site: count - tried[site] for site, count in remedies.items() if site not in NOT_TRIED and tried[site] < count
    } == {}
    assert sorted(site for site in NOT_TRIED if site not in remedies or site in tried) == []
