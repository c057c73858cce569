"""A site with images of its own, requests of a round to it, its app's answers, and what its audit holds of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from polyclinic.client.app import make_client_app
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import ModelState, read_model_state
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.wire.codec import AnyRecord, decode_record, encode_record
from polyclinic.common.wire.fleet_protocol import ROLL_CALL_TYPE
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import BenefitRequest, EvaluateRequest, ModelGroups, Record, RollCall, TrainRequest
from polyclinic.data.base.image_set import ImageSet

OWN = ("b", "a")
FEW_PHANTOMS = 'data={kind = "phantom", images = 90, image_size = 16}'
SMALL_RUN = (FEW_PHANTOMS, "training.batch_size=16", "evaluation.checkpoint=last")
"""Overrides with which a federation of tests/federations.py trains on few images; the best model may be the first."""


class Killed(BaseException):
    """Like SIGKILL: nothing on the way catches it."""


def images(seed: int, count: int, class_names: tuple[str, ...] = OWN) -> ImageSet:
    """Noise, brighter where the first class is present; every class occurs and is absent."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (count, len(class_names))).astype(np.float32)
    labels[0], labels[1] = 0, 1
    pixels = rng.integers(0, 180, (count, 16, 16)) + 60 * labels[:, :1, None]
    names = np.array([f"{seed}-{row}" for row in range(count)])
    return ImageSet(pixels.astype(np.uint8), labels, class_names, names, np.full(count, ""))


def site(folder: Path, **policy: Any) -> Site:
    """A hospital with few images, of level trusted unless its policy says otherwise."""
    parts = images(1, 40), images(2, 16), images(3, 16)
    return Site(LabelDeclaration("north", OWN), *parts, folder, policy=SitePolicy(**policy), durable=False)


OPTIMIZERS = {"scaffold": {"optimizer": "sgd"}}
"""What a method needs to train at all."""


def plan(method: str = "surgical", parameters: Mapping[str, Any] | None = None, **training: Any) -> HospitalPlan:
    return HospitalPlan.model_validate(
        {
            "run": {"method": method, "seed": 5},
            "method": parameters or {},
            "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16, "neck": 8},
            "training": {"batch_size": 8, "lr": 0.01, **OPTIMIZERS.get(method, {}), **training},
            "augmentation": {},
        }
    )


def changed_plan(of: HospitalPlan, **tables: Mapping[str, Any]) -> HospitalPlan:
    """The plan with other values in some tables, which nothing checks."""
    return of.model_copy(update={name: getattr(of, name).model_copy(update=keys) for name, keys in tables.items()})


def private_plan(of: HospitalPlan, **privacy: Any) -> HospitalPlan:
    """The plan with this privacy, and with what noise needs: group normalisation, and the last checkpoint."""
    tree = of.model_dump(mode="json")
    tree["model"]["norm"], tree["evaluation"]["checkpoint"] = "group", "last"
    return HospitalPlan.model_validate({**tree, "privacy": privacy})


def beginning(of: HospitalPlan, rows: Sequence[str] = OWN) -> ModelState:
    return read_model_state(build_network(of.model, rows, of.run.seed))


def request(
    of: HospitalPlan, model: ModelState | None = None, server_round: int = 1, counted: int = 0, best: int = -1
) -> TrainRequest:
    """A request to train, by default from the run's first model."""
    model = model or beginning(of)
    facts = (of.model_dump_json(), "contract", model.head.class_names)
    even = np.full(len(model.head.class_names), 0.5, np.float32)
    statistics = {"prior": even, "factor": even[:1]} if of.run.method in ("fedsld", "fedavg_scaled") else {}
    groups = ModelGroups(model.trunk, model.norm, model.head)
    return TrainRequest("run", server_round, *facts, counted, best, "", groups, statistics)


def evaluate_request(train: TrainRequest, *, test: bool = True) -> EvaluateRequest:
    """The request to evaluate the model of a request to train."""
    return EvaluateRequest(**{name: value for name, value in vars(train).items() if name != "statistics"}, test=test)


def evaluation(of: HospitalPlan, model: ModelState, server_round: int, counted: int, best: int) -> EvaluateRequest:
    return evaluate_request(request(of, model, server_round, counted, best))


def benefit_request(
    of: HospitalPlan, model: ModelState, initial: ModelState, server_round: int, epochs: int
) -> BenefitRequest:
    facts = vars(evaluation(of, model, server_round, 0, -1))
    facts = {name: value for name, value in facts.items() if name != "test"}
    return BenefitRequest(**facts, initial=ModelGroups.from_model(initial), epochs=epochs)


def send(at: Site, kind: str, content: RecordDict | Record) -> Message:
    """The app's own answer to a message."""
    content = content if isinstance(content, RecordDict) else encode_record(content)
    return make_client_app(lambda context: at)(make_request(content, 2, kind), Context(1, 2, {}, RecordDict(), {}))


def record_of(message: Message, kind: type[AnyRecord]) -> AnyRecord:
    """The record that a site answered with."""
    assert not message.has_error(), message.error.reason
    return decode_record(message.content, kind)


def called(at: Site, of: HospitalPlan) -> Message:
    return send(at, ROLL_CALL_TYPE, RollCall("run", of.model_dump_json()))


def trained(at: Site, of: HospitalPlan) -> Message:
    return send(at, "train", request(of))


def judged(at: Site, of: HospitalPlan) -> Message:
    return send(at, "evaluate", evaluation(of, beginning(of), 1, 0, -1))


def log(at: Site) -> list[Any]:
    return list(AuditLog(at.folder).read_entries())
