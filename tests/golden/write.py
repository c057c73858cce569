"""Write the golden bytes of a release: what it sends, and the hashes and keys that both sides derive.

Each release writes its own, by its own code: see README.md beside this file. The file imports only the release.

    python tests/golden/write.py FOLDER [--prefix PREFIX]
"""

import argparse
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec


def import_module(prefix: str, name: str) -> Any:
    """Import a module of the release: its packages stand below ``polyclinic.``, or earlier at the top level."""
    return importlib.import_module(prefix + name)


def _make_count_records(prefix: str) -> list[Any]:
    """Return question and answer of a count; none for a release that does not count."""
    try:
        counts = import_module(prefix, "common.wire.counts")
    except ModuleNotFoundError:
        return []
    told = (("class", "sex"), ("b", ""), ("present", "all"), ("", "female"), (12, -3), ())
    tables = ("class", "sex"), ("age",), ("year",)
    answer = ("run-1", "north", "private", "2026-11-30", 10, ("b", "a"), *tables, *told, 7.5, ("class: b", "sex"))
    return [counts.CountRequest("run-1", '{"tables": ["class"]}'), counts.CountReply(*answer)]


def _make_delivery_records(prefix: str) -> list[Any]:
    """Return a package; none for a release that delivers none."""
    try:
        delivery = import_module(prefix, "common.wire.delivery")
    except ModuleNotFoundError:
        return []
    return [delivery.make_delivery_request("run-1", b"PK\x05\x06\xff")]


def _make_scoring_records(prefix: str) -> list[Any]:
    """Return models to score, and figures; none for a release that scores none."""
    try:
        scoring = import_module(prefix, "common.wire.evaluation")
    except ModuleNotFoundError:
        return []
    nan, zeros = float("nan"), np.zeros(1024, np.int64)
    first, last = zeros.copy(), zeros.copy()
    first[0], last[-1] = 300, 5
    answer = scoring.ScoringReply(
        *("run-1", "north", "trusted", 10, 320, 200, ("b", "a"), ("a",), True, ("age",)),
        *(("m", "m"), ("b", "b"), ("", "sex"), ("", "female"), (5, 0), (300, 0), (4, 0), (196, 0)),
        *((0.5, nan), (0.25, nan), (0.75, nan), (0.5, nan), (0.25, nan), (0.75, nan), (0.125, nan), (0.0625, nan)),
        *(np.concatenate([last, zeros]), np.concatenate([first, zeros]), (0.5, *(0.0,) * 8, 4.5, *(0.0,) * 10)),
        *((0, 0), ("stated", "none fixed"), (0.25, 0.5), (5, 4), (0, 1)),
        *((0.25, 0.5), (0.75, 1.0), (0.5, nan), (0.75, nan)),
        *(("b",), ("m",), ("n",), (-0.25,), (-0.5,), (0.0,), (0.125,), ("DeLong",)),
    )
    return [scoring.make_scoring_request("run-1", '{"models": []}', b"PK\x05\x06\xff"), answer]


def make_golden_records(prefix: str) -> list[Any]:
    """Return one record of each class that is sent, with a value in each of its fields."""
    wire = import_module(prefix, "common.wire.records")
    masking = import_module(prefix, "common.wire.secure_aggregation")
    head = import_module(prefix, "common.models.network").Head(
        ("b", "a"), np.array([[1.5, -2], [0, 3]], np.float32), np.array([-1, 0.5], np.float32)
    )
    trunk, norm = np.array([0.25, -7, 1 / 3], np.float32), np.array([2, -0.5], np.float32)
    whole = wire.ModelGroups(trunk, norm, head)
    small = wire.ModelGroups(np.array([0.25, -8, 0.5], np.float32), None, None, "int8")
    frozen = wire.ModelGroups(np.array([9.5, 0], np.float32))
    statistics = {"prior": np.array([[0.25, np.nan], [-3, 0.5]], np.float32), "none": np.zeros((0, 2), np.float32)}
    about = {"plan": '{"run": 1}', "contract": "c" * 64, "class_names": ("b", "a"), "counted": 3, "best": -1}
    asked = {"run": "run-1", "round": 4, **about, "left_out": "round 3: too late", "model": whole, "frozen": frozen}
    replied = {"run": "run-1", "round": 4, "site": "north"}
    bins, answers = 1024, {field.name for field in dataclasses.fields(wire.RollCallAnswer)}
    pixels = '{"color": true, "height": 64, "width": 64}'
    stated = {"pixels": pixels, "level": "masked", "shown": "1?"}
    first, last = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    first[0], last[-1] = 300, 5
    return [
        wire.RollCall("run-1", '{"run": 1}'),
        wire.RollCallAnswer(
            *("run-1", "north", ("B", "A"), ("b", "a"), 12, -1, 9, "1" * 64, "0.1.0", (5, -1), (7, -1), 10, True),
            **{name: value for name, value in stated.items() if name in answers},
        ),
        wire.Refusal("run-1", "labels", "site north: it has no label."),
        *([wire.Question("run-1", "Is it one class?")] if hasattr(wire, "Question") else []),
        wire.RefusalNoted("run-1", "north"),
        *_make_count_records(prefix),
        *_make_delivery_records(prefix),
        *_make_scoring_records(prefix),
        wire.TrainRequest(**asked, statistics=statistics),
        wire.TrainReply(
            **replied,
            train_samples=12,
            train_loss=0.5,
            validation_loss=None,
            validation_auroc=0.75,
            seconds=1.25,
            update=small,
            epochs=3,
            statistics=statistics,
            test_images=9,
            test_correct=4,
            epsilon=1.5,
            arithmetic="float32",
        ),
        wire.EvaluateRequest(**asked, test=True),
        wire.EvaluateReply(
            **replied,
            validation_loss=0.5,
            validation_auroc=None,
            class_names=("b", "a"),
            auroc=(float("nan"), 0.5),
            average_precision=(0.25, 0.5),
            balanced_accuracy=(0.5, 0.5),
            positives=(4, 5),
            negatives=(7, 300),
            model_sha256="2" * 64,
            test_images=9,
            test_correct=4,
            histogram_classes=("a",),
            positive_scores=last,
            negative_scores=first,
            validation_classes=("a",),
            validation_positive_scores=last,
            validation_negative_scores=first,
            metric_names=("kappa",),
            metric_values=(0.5, -0.25),
            masked_classes=("b",),
        ),
        wire.BenefitRequest(**asked, initial=whole, epochs=6),
        wire.BenefitReply(
            *("run-1", 4, "north", ("b", "a")),
            (0.75, 0.5, 1.0, 0.25, 0.75, 0.75, 0.875, 0.5),
            *((0.625, 0.625, 0.75, 0.6875), (0.5, 0.5, 0.625, 0.5), (0.75, 0.75, 0.875, 0.75)),
            *((0.0, 0.125, 0.0625), (-0.25, -0.125, -0.0625), (0.25, 0.25, 0.125)),
            True,
        ),
        masking.KeysRequest("run-1", 4, ("north", "south"), 3),
        masking.KeysAnswer("run-1", 4, "north", b"{}", b"s", "line"),
        masking.SharesRequest("run-1", 4, (b"{}", b"{ }"), (b"", b"s"), ("", "line")),
        masking.SharesAnswer("run-1", 4, "north", ("south",), (b"letter",)),
        masking.MaskedRequest("run-1", 4, ("south",), (b"letter",), 3),
        masking.MaskedAnswer("run-1", 4, "north", np.array([0, 2**32 - 1, 7], np.uint32)),
        masking.RevealRequest("run-1", 4, ("north",)),
        masking.RevealAnswer("run-1", 4, "north", ("north", "south"), ("", "b"), (b"1", b"2"), (), ()),
    ]


def encode_golden_records(prefix: str) -> dict[str, bytes]:
    """Return record class -> canonical bytes of its record as it travels; the first line is JSON."""
    codec, canonical = (import_module(prefix, f"common.wire.{name}") for name in ("codec", "canonical_bytes"))
    return {
        type(record).__name__: b"".join(canonical.iterate_canonical_bytes(codec.encode_record(record)))
        for record in make_golden_records(prefix)
    }


def derive_golden_values(prefix: str) -> dict[str, Any]:
    """Return the hashes, keys and masks that both sides must derive alike, by what they are."""
    crypto = import_module(prefix, "strategies.privacy.secure_aggregation.crypto")
    codec, canonical = (import_module(prefix, f"common.wire.{name}") for name in ("codec", "canonical_bytes"))
    identity = import_module(prefix, "common.security.identity")
    contract = import_module(prefix, "common.contract")
    own, other = ec.derive_private_key(12345, ec.SECP256R1()), ec.derive_private_key(67890, ec.SECP256R1())
    secret = crypto.compute_shared_secret(own, crypto.encode_public_key_hex(other))
    vector = np.arange(5, dtype=np.uint32)
    crypto.add_mask_to_vector(vector, [slice(1, 3), slice(4, 5)], secret)
    line = identity.format_public_key_line(own, "north")
    labels = [
        contract.LabelDeclaration("north", ("B", "A"), {"B": "b", "A": "a"}),
        contract.LabelDeclaration("south", ("a",), {"a": "a"}),
    ]
    numbers = np.array([0.25, -8, 1 / 3, 1e-9], np.float32)
    rounded = {form: codec.round_to_number_format(numbers, form) for form in ("float32", "float16", "int8")}
    return {
        "hash of each record": {
            type(record).__name__: canonical.hash_record(codec.encode_record(record))
            for record in make_golden_records(prefix)
        },
        "shared secret": secret.hex(),
        "masked vector": vector.tolist(),
        "fingerprint of a key": identity.compute_public_key_fingerprint(line),
        "hash of a label contract": contract.merge_label_declarations(labels).hash,
        "packed numbers": {form: codec.pack_numbers(values, form).hex() for form, values in rounded.items()},
    }


def write_golden_files(folder: Path, prefix: str) -> None:
    """Write one file for each record, and the derived values."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in encode_golden_records(prefix).items():
        (folder / f"{name}.record").write_bytes(content)
    text = json.dumps(derive_golden_values(prefix), indent=2, sort_keys=True)
    (folder / "derived.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--prefix", default="polyclinic.")
    given = arguments.parse_args()
    write_golden_files(given.folder, given.prefix)
