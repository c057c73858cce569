"""``flwr-server evaluate``: three models over five hospitals with unlike labels, what leaves, and what is refused."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score
from torch import nn

from polyclinic.client.app import make_client_app
from polyclinic.client.gate.gate import DECLINED_ERROR_CODE
from polyclinic.client.preview.data_dictionary import FIELD_MEANINGS
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput
from polyclinic.common.evaluation.evaluation import Evaluation
from polyclinic.common.evaluation.figures import ALL_DATA, FigureRow
from polyclinic.common.evaluation.foreign import find_model_file
from polyclinic.common.evaluation.question import EvaluationQuestion, GroupColumn
from polyclinic.common.metrics.delong import compare_by_delong
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.evaluation import ScoringReply, make_scoring_request
from polyclinic.data.base.attributes import ImageAttributes
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.server.evaluation.ask import NetworkEvaluation, ask_for_figures
from polyclinic.server.evaluation.collect import QuestionWithModels, make_question
from polyclinic.server.evaluation.models import find_models_to_send
from polyclinic.server.evaluation.pool import POOLED_TEST_NAME
from polyclinic.server.questions.exchange import QuestionExchange
from tests.client.counted import HospitalsGrid
from tests.client.rounds import send
from tests.common.evaluation.models import (
    SIDE,
    describe,
    make_timm_network,
    write_exported_program,
    write_onnx_model,
)

LISTS = {
    "east": ("Effusion", "Mass"),
    "north": ("Erguss", "Nodule"),
    "south": ("Mass", "Cardiomegaly"),
    "west": ("Effusion", "Cardiomegaly", "Nodule"),
    "centre": ("Pneumonia",),
}
"""Hospital -> the classes that it annotates. "Erguss" is Effusion by the vocabulary of a model."""
RARE = {"west": "Nodule"}
"""Hospital -> a class of few patients there."""
MODELS = {
    "run": ("Effusion", "Mass", "Nodule"),
    "other": ("Effusion", "Cardiomegaly"),
    "third": ("Mass", "Erguss"),
}
MEANS = {"Erguss": "Effusion"}
COUNT = 160
Floats = NDArray[np.floating]


def made_test_part(seed: int, class_names: tuple[str, ...], rare: str = "") -> ImageSet:
    """Images of noise, labelled partly by how bright a corner is, so that models are better or worse than chance."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (COUNT, SIDE, SIDE), dtype=np.uint8)
    corner = pixels[:, : SIDE // 2, : SIDE // 2].mean(axis=(1, 2))
    lean = (corner - corner.mean()) / corner.std()
    labels = (lean[:, None] + random.normal(0, 2, (COUNT, len(class_names))) > 0.3).astype(np.float32)
    labels[random.random(labels.shape) < 0.05] = np.nan
    if rare:
        labels[:, class_names.index(rare)] = np.arange(COUNT) < 4
    attributes = ImageAttributes(
        np.array(["female", "male"])[random.integers(0, 2, COUNT)],
        random.integers(20, 90, COUNT).astype(np.int16),
        np.full(COUNT, 2020, np.int16),
        np.full(COUNT, ""),
        ("sex", "age"),
    )
    patients = np.array([f"P{number}" for number in range(COUNT)])
    return ImageSet(pixels, labels, class_names, patients, np.full(COUNT, ""), attributes=attributes)


NOISE = np.random.default_rng(0).integers(0, 256, (100, SIDE, SIDE), dtype=np.uint8)


def made_third_network() -> nn.Module:
    """A network of timm whose scores are spread: those of random weights lie close together."""
    network = make_timm_network(2)
    with torch.no_grad():
        logits = network(torch.from_numpy((NOISE[:, None].astype(np.float32) / 255 - 0.5) / 0.25))
        spread = 1 / logits.std()
        network.get_parameter("fc.weight").mul_(spread)
        network.get_parameter("fc.bias").sub_(logits.mean(dim=0)).mul_(spread)
    return network


def write_run_with_spread_scores(folder: Path) -> None:
    """Save a network as a run does; its scores are spread, too."""
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=SIDE)
    network = build_network(spec, MODELS["run"], 0).eval()
    logits = torch.logit(torch.from_numpy(compute_picture_probabilities(network, NOISE))).mean(dim=0)
    with torch.no_grad():
        network.get_parameter("head.weight").mul_(400)
        network.get_parameter("head.bias").sub_(logits).mul_(400)
    form = PixelForm(color=False, height=SIDE, width=SIDE, resize="pad", decoded=True)
    save_model(folder, network, label_contract_sha256="", pixels=form)


def made_site(folder: Path, name: str, seed: int, **policy: Any) -> Site:
    images = made_test_part(seed, LISTS[name], RARE.get(name, ""))
    few = images.select_rows(np.arange(20))
    options = {"evaluate": True, **policy}
    declaration = LabelDeclaration(name, LISTS[name])
    return Site(declaration, few, few, images, folder / name, durable=False, policy=SitePolicy(**options))


@dataclass(frozen=True)
class Federation:
    """Five hospitals, the question with three models, and their files."""

    folder: Path
    sites: Mapping[str, Site]

    @cached_property
    def paths(self) -> list[Path]:
        return [self.folder / "run", self.folder / "other.toml", self.folder / "third.toml"]

    def ask(
        self, groups: Sequence[GroupColumn] = (), **policies: Mapping[str, Any]
    ) -> tuple[NetworkEvaluation, "Kept"]:
        """Ask the hospitals; some may have another policy."""
        sites = {
            name: replace(site, policy=SitePolicy(**{"evaluate": True, **policies[name]})) if name in policies else site
            for name, site in self.sites.items()
        }
        grid = Kept({name: make_client_app(lambda context, site=site: site) for name, site in sites.items()})
        registered = dict(enumerate(sorted(sites), 2))
        exchange = QuestionExchange(grid, 60.0, lambda: registered)
        return ask_for_figures(exchange, self.question(groups)), grid

    def question(self, groups: Sequence[GroupColumn] = ()) -> QuestionWithModels:
        return make_question(find_models_to_send(self.paths), groups, "How good are they?")

    def score(self, site: str) -> dict[str, dict[str, Floats]]:
        """Model -> class -> scores of a hospital's test part, by each model's own library."""
        pixels = self.sites[site].test.stored
        inputs = (pixels[:, None].astype(np.float32) / 255 - 0.5) / 0.25
        session = onnxruntime.InferenceSession(str(self.folder / "other.onnx"), providers=["CPUExecutionProvider"])
        logits = {"other": session.run(None, {session.get_inputs()[0].name: inputs})[0]}
        with torch.no_grad():
            logits["third"] = made_third_network()(torch.from_numpy(inputs)).numpy()
        probabilities = {model: 1 / (1 + np.exp(-of_model)) for model, of_model in logits.items()}
        probabilities["run"] = compute_picture_probabilities(load_model(self.folder / "run"), pixels)
        return {
            model: dict(zip((MEANS.get(name, name) for name in names), probabilities[model].T, strict=True))
            for model, names in MODELS.items()
        }

    def labels(self, site: str) -> dict[str, Floats]:
        test = self.sites[site].test
        return {MEANS.get(name, name): test.labels[:, place] for place, name in enumerate(test.class_names)}

    def known(self, site: str, model: str, name: str) -> tuple[Floats, Floats]:
        """Labels and scores of the images whose label is known."""
        labels, scores = self.labels(site)[name], self.score(site)[model][name]
        known = ~np.isnan(labels)
        return labels[known], scores[known]


class Kept(HospitalsGrid):
    """Keeps the answers of the hospitals."""

    def pull_messages(self, message_ids: Any) -> Sequence[Message]:
        self.replies = list(super().pull_messages(message_ids))
        return self.replies


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    folder = tmp_path_factory.mktemp("five")
    write_run_with_spread_scores(folder / "run")
    chosen = {"Effusion": [{"rule": "youden", "target": None, "threshold": 0.5078125, "chosen_on": [3, 4]}]}
    summary = {"test": {"operating_points": chosen, "per_site": {"south": "secret"}}}
    (folder / "run" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    more = "[operating_points]\nEffusion = 0.4\n"
    describe(folder / "other.toml", write_onnx_model(folder / "other.onnx", 2), MODELS["other"], pixels=more)
    words = '[vocabulary.Effusion]\nsynonyms = ["Erguss"]\n'
    tensors = folder / "third.safetensors"
    save_file({name: tensor.clone() for name, tensor in made_third_network().state_dict().items()}, tensors)
    describe(folder / "third.toml", tensors, MODELS["third"], more='architecture = "timm:test_resnet"', pixels=words)
    return Federation(folder, {name: made_site(folder, name, seed) for seed, name in enumerate(LISTS)})


@pytest.fixture(scope="module")
def answered(federation: Federation) -> tuple[NetworkEvaluation, Kept]:
    return federation.ask()


def rows_of(evaluation: Evaluation) -> dict[tuple[str, str, str], FigureRow]:
    return {(row.data, row.model, row.class_name): row for row in evaluation.figures.rows if not row.column}


def list_expected(federation: Federation) -> list[tuple[str, str, str]]:
    """Hospital, model and class of each row that there must be."""
    return [
        (site, model, name)
        for site in LISTS
        for model, by_class in federation.score(site).items()
        for name in by_class
        if name in federation.labels(site) and RARE.get(site) != name
    ]


def test_figures_of_each_hospital_are_those_of_scikit_learn(
    federation: Federation, answered: tuple[NetworkEvaluation, Kept]
) -> None:
    rows = rows_of(answered[0].evaluation)
    expected = list_expected(federation)
    assert set(expected) == {key for key in rows if key[0] != ALL_DATA}
    assert answered[0].silent == {}
    for key in expected:
        labels, scores = federation.known(*key)
        figures = rows[key].figures
        assert (figures.positives, figures.negatives) == ((labels == 1).sum(), (labels == 0).sum())
        assert figures.auroc == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
        assert figures.average_precision == pytest.approx(average_precision_score(labels, scores), abs=1e-6)
        assert figures.calibration is not None
        assert figures.calibration.brier == pytest.approx(brier_score_loss(labels, scores), abs=1e-6)
        assert figures.auroc_interval is not None
        assert figures.auroc_interval[0] < (figures.auroc or 0) < figures.auroc_interval[1]
        for point in figures.points:
            above = scores > point.threshold
            assert point.decisions.sensitivity == pytest.approx(above[labels == 1].mean())
            assert point.decisions.specificity == pytest.approx(1 - above[labels == 0].mean())


def test_figures_of_all_hospitals_are_those_of_scikit_learn_within_the_bounds_that_they_state(
    federation: Federation, answered: tuple[NetworkEvaluation, Kept]
) -> None:
    together = {key[1:]: row.figures for key, row in rows_of(answered[0].evaluation).items() if key[0] == ALL_DATA}
    expected = list_expected(federation)
    assert set(together) == {key[1:] for key in expected}
    for (model, name), figures in together.items():
        parts = [federation.known(*key) for key in expected if key[1:] == (model, name)]
        labels, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        assert (figures.positives, figures.negatives) == ((labels == 1).sum(), (labels == 0).sum())
        assert figures.auroc is not None
        assert figures.average_precision is not None
        assert figures.calibration is not None
        assert abs(figures.auroc - roc_auc_score(labels, scores)) <= figures.auroc_error + 1e-9
        assert 0 < figures.auroc_error < 0.05
        difference = abs(figures.average_precision - average_precision_score(labels, scores))
        assert difference <= figures.average_precision_error + 1e-9
        assert figures.calibration.brier == pytest.approx(brier_score_loss(labels, scores), abs=1e-6)
        edges = np.searchsorted(np.arange(1, 10) / 10, scores.astype(np.float64), side="left")
        gaps = [abs((scores - labels)[edges == tenth].sum()) for tenth in range(10)]
        assert figures.calibration.expected_error == pytest.approx(sum(gaps) / len(labels), abs=1e-6)
        for point in figures.points:
            above = scores > point.threshold
            assert point.decisions.sensitivity == pytest.approx(above[labels == 1].mean())
            assert point.decisions.specificity == pytest.approx(1 - above[labels == 0].mean())
    assert [(point.rule, point.threshold) for point in together["run", "Effusion"].points] == [
        ("Youden on validation", 0.5078125)
    ]
    assert [(point.rule, point.threshold) for point in together["other", "Effusion"].points] == [("stated", 0.4)]


def test_two_models_are_compared_by_delong_at_each_hospital_and_by_inverse_variance_over_all(
    federation: Federation, answered: tuple[NetworkEvaluation, Kept]
) -> None:
    compared = {
        (each.data, each.class_name, each.first, each.second): each
        for each in answered[0].evaluation.figures.comparisons
    }
    sites = ("east", "north", "west")
    parts = []
    for site in sites:
        labels, first = federation.known(site, "run", "Effusion")
        _, second = federation.known(site, "third", "Effusion")
        delong = compare_by_delong(first, second, labels)
        assert delong is not None
        each = compared[site, "Effusion", "run", "third"]
        assert (each.difference.value, each.p_value) == pytest.approx((delong.difference, delong.p_value), abs=1e-6)
        assert each.images == len(labels)
        parts.append((delong.difference, delong.standard_error))
    weights = [error**-2 for _, error in parts]
    pooled = compared[ALL_DATA, "Effusion", "run", "third"]
    mean = sum(weight * value for weight, (value, _) in zip(weights, parts, strict=True)) / sum(weights)
    assert pooled.test == POOLED_TEST_NAME
    assert pooled.difference.value == pytest.approx(mean, abs=1e-6)
    assert pooled.standard_error == pytest.approx(sum(weights) ** -0.5, abs=1e-6)
    assert {key[1:] for key in compared} == {
        ("Effusion", "run", "other"),
        ("Effusion", "run", "third"),
        ("Effusion", "other", "third"),
        ("Mass", "run", "third"),
    }


def test_a_class_of_few_patients_is_hidden_and_named_and_what_a_hospital_lacks_never_counts_as_absent(
    answered: tuple[NetworkEvaluation, Kept],
) -> None:
    evaluation = answered[0].evaluation
    assert ("west", "run", "Nodule") not in rows_of(evaluation)
    assert ("north", "run", "Nodule") in rows_of(evaluation)
    assert "west hides “Nodule”: fewer than 10 patients show it or do not." in evaluation.notes
    assert not [key for key in rows_of(evaluation) if key[0] == "centre"]
    coverage = {(each.data, each.model): each for each in evaluation.figures.coverage}
    assert coverage["centre", "run"].not_annotated == MODELS["run"]
    assert evaluation.cautions == (
        "Nobody knows here on which images other and third were trained. If they were trained on some of these, the "
        "figures are too good.",
    )


def test_what_leaves_is_in_the_data_dictionary_and_the_models_files_are_removed(
    federation: Federation, answered: tuple[NetworkEvaluation, Kept]
) -> None:
    for reply in answered[1].replies:
        names = {name.partition("/")[0] for name in reply.content["fields"] if not name.startswith("wire.")}
        assert list(reply.content) == ["fields"]
        assert names == set(FIELD_MEANINGS["ScoringReply"])
    assert not list(federation.folder.glob("*/scoring"))
    audit = (federation.folder / "east" / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in audit]
    assert [(line["record"], line["decision"]) for line in lines] == [
        ("ScoringRequest", "allow"),
        ("ScoringReply", "allow"),
    ]


def test_a_run_sends_its_thresholds_and_nothing_else_of_its_summary(federation: Federation) -> None:
    assert b"secret" not in federation.question().content
    assert b"youden" in federation.question().content


# ---------------------------------------------------------------------- what a hospital allows


def test_a_hospital_that_has_not_set_the_key_refuses_and_says_which_line_to_write(federation: Federation) -> None:
    hashes = [model.sha256 for model in federation.question().question.models]
    some = [*hashes[:2], "0" * 64]
    result, grid = federation.ask(east={"evaluate": False}, north={"evaluate": some}, south={"evaluate": hashes})
    assert list(result.silent) == ["east", "north"]
    line = ", ".join(f'"{each}"' for each in hashes)
    assert f"in [policy] of site.toml: evaluate = [{line}]" in result.silent["east"]
    assert f'evaluate = ["{some[0]}", "{some[1]}", "{some[2]}", "{hashes[2]}"]' in result.silent["north"]
    assert [reply.error.code for reply in grid.replies if reply.has_error()] == [DECLINED_ERROR_CODE] * 2
    assert {each.name for each in result.evaluation.data} == {"south", "west", "centre"}
    assert result.evaluation.cautions[0].startswith("east did not answer: ")


def test_at_masked_and_private_no_figure_of_one_hospital_leaves(federation: Federation) -> None:
    result, _ = federation.ask(east={"level": "masked"}, north={"level": "private"}, south={"test_metrics": False})
    assert list(result.silent) == ["east", "north", "south"]
    assert all("flwr-client evaluate" in reason for reason in result.silent.values())


def test_without_score_histograms_exact_figures_leave_and_no_counts_by_score(federation: Federation) -> None:
    result, grid = federation.ask(east={"score_histograms": False})
    reply = next(
        record for message in grid.replies if (record := decode_record(message.content, ScoringReply)).site == "east"
    )
    assert (len(reply.positive_scores), reply.point_rows, reply.score_sums) == (0, (), ())
    evaluation = result.evaluation
    assert "east does not tell how scores are spread: it is not in the figures of all together." in evaluation.notes
    rows = rows_of(evaluation)
    assert rows["east", "run", "Effusion"].figures.points == ()
    labels, scores = federation.known("east", "run", "Effusion")
    assert rows["east", "run", "Effusion"].figures.auroc == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    pooled = sum(len(federation.known(site, "run", "Effusion")[0]) for site in ("north", "west"))
    together = rows[ALL_DATA, "run", "Effusion"].figures
    assert together.positives + together.negatives == pooled


def test_subgroups_leave_where_counts_has_them_and_each_group_is_of_enough_patients(federation: Federation) -> None:
    result, _ = federation.ask(
        ("sex", "age"),
        east={"counts": ["class_by_sex"]},
        north={"smallest_count": 60},
        centre={"counts": []},
    )
    evaluation = result.evaluation
    assert "east tells no subgroups by age." in evaluation.notes
    assert "north tells no subgroups by sex and age." in evaluation.notes
    rows = {(row.model, row.class_name, row.group): row.figures for row in evaluation.figures.rows if row.column}
    parts = []
    for site in ("east", "west"):
        test = federation.sites[site].test
        assert test.attributes is not None
        labels, scores = federation.labels(site)["Effusion"], federation.score(site)["run"]["Effusion"]
        women = ~np.isnan(labels) & (test.attributes.sex == "female")
        parts.append((labels[women], scores[women]))
    labels, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    women_of_both = rows["run", "Effusion", "female"]
    assert women_of_both.positives + women_of_both.negatives == len(labels)
    assert women_of_both.auroc is not None
    assert abs(women_of_both.auroc - roc_auc_score(labels, scores)) <= women_of_both.auroc_error + 1e-9


def test_a_test_part_of_few_patients_tells_nothing(federation: Federation) -> None:
    few = replace(federation.sites["east"], test=federation.sites["east"].test.select_rows(np.arange(9)))
    result, _ = replace(federation, sites={"east": few}).ask()
    assert list(result.silent) == ["east"]
    assert "fewer than 10 patients" in result.silent["east"]


# ---------------------------------------------------------------------- what is refused


def ask_site(site: Site, question: EvaluationQuestion, content: bytes) -> Message:
    return send(site, "query.scoring", make_scoring_request("evaluate-1", question.model_dump_json(), content))


def test_a_changed_byte_of_a_model_is_refused_by_its_hash(federation: Federation) -> None:
    asked = federation.question()
    for place in (0, len(asked.content) // 2, len(asked.content) - 1):
        changed = bytearray(asked.content)
        changed[place] ^= 1
        reply = ask_site(federation.sites["east"], asked.question, bytes(changed))
        assert reply.error.code == DECLINED_ERROR_CODE
        assert "it was changed" in reply.error.reason
    assert ask_site(federation.sites["east"], asked.question, asked.content + b"x").has_error()
    assert not ask_site(federation.sites["east"], asked.question, asked.content).has_error()


def test_a_file_that_can_run_a_program_is_sent_by_nobody_and_taken_by_nobody(
    federation: Federation, tmp_path: Path
) -> None:
    file = write_exported_program(tmp_path / "other.pt2", 1)
    path = describe(tmp_path / "other.toml", file, ("Effusion",))
    with pytest.raises(BadInput, match="run any program"):
        find_models_to_send([path])
    described = find_model_file(path, frozenset({file})).described
    assert described is not None
    sent = {"name": "model.pt2", "sha256": described.sha256, "size": file.stat().st_size}
    whole = described.model_copy(update={"file": "model.pt2"}).model_dump(mode="json")
    text = json.dumps({"models": [{"name": "other", "files": [sent], "described": whole}]})
    reply = send(federation.sites["east"], "query.scoring", make_scoring_request("evaluate-1", text, file.read_bytes()))
    assert reply.error.code == DECLINED_ERROR_CODE
    assert "a .pt2 file is not scored over the network" in reply.error.reason


def test_a_network_that_the_policy_does_not_list_is_not_built(federation: Federation) -> None:
    result, _ = federation.ask(east={"networks": ["torchvision:*"]})
    assert 'policy.networks: it does not have "timm:test_resnet"' in result.silent["east"]


def test_an_onnx_file_reads_no_other_file_of_the_hospital(federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../../labels.csv"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content = onnx.ModelProto.SerializeToString(model)
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": "model.onnx", "sha256": digest, "size": len(content)}
    pixels = {"color": False, "image_size": SIDE}
    stated = {"classes": ["Effusion"], "outputs": "logits", "mean": [0.5], "std": [0.25], "pixels": pixels}
    described = {"file": "model.onnx", "sha256": digest, **stated}
    question = EvaluationQuestion.model_validate({"models": [{"name": "a", "files": [file], "described": described}]})
    site = replace(federation.sites["east"], folder=tmp_path)
    with pytest.raises(BadInput, match="no ONNX model that can be read"):
        ask_site(site, question, content)
