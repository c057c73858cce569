"""Hospitals whose real gate and app answer a coordinator that may send each of them something else."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from polyclinic.client.app import make_client_app
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput
from polyclinic.common.models.state import ModelState
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.common.wire.codec import AnyRecord, decode_record, encode_record
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import Record, TrainReply, TrainRequest
from polyclinic.common.wire.secure_aggregation import STAGE_BY_REQUEST, RevealRequest
from polyclinic.strategies.privacy.secure_aggregation.coordinator import MaskedSummation, MaskedSumRequest, UnmaskedSum
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import make_distributed_noise
from polyclinic.strategies.privacy.secure_aggregation.site import SiteSigningIdentity
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    FIXED_POINT_ONE,
    UpdateVectorLayout,
    choose_max_update_value,
    flatten_update,
)
from polyclinic.strategies.registry import build_site_method
from tests.client.rounds import OWN, beginning, changed_plan, images, plan, request

NAMES = ("ash", "birch", "cedar")
FOUR = (*NAMES, "elm")
NOBODY_HAS = "0" * 64
"""A weights file named by a plan: no hospital compares the first model, and masks have to do without that."""
Change = Callable[[str, Any], Any]
"""Site and message -> the message that this site gets instead."""


def honest(site: str, message: Any) -> Any:
    """Change nothing."""
    return message


def of_training(change: Callable[[TrainRequest], Any], spared: Collection[str] = ()) -> Change:
    """Change the requests to train of all sites but the spared ones."""
    return lambda site, message: (
        change(message) if isinstance(message, TrainRequest) and site not in spared else message
    )


def of_opening(**changes: Any) -> Change:
    """Change the requests to open the sum."""
    return lambda site, message: replace(message, **changes) if isinstance(message, RevealRequest) else message


def with_trunk(request: TrainRequest, times: float) -> TrainRequest:
    """The request with so many times its trunk, where it has one."""
    trunk = request.model.trunk
    scaled = None if trunk is None else trunk * np.float32(times)
    return replace(request, model=replace(request.model, trunk=scaled))


def forged(record: Any, **fields: Any) -> Any:
    """A record with other fields that nothing checked: a coordinator need not run our code."""
    copied = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied


def masked_plan(method: str = "vanilla", parameters: Mapping[str, Any] | None = None, **training: Any) -> HospitalPlan:
    """One local step of plain descent, whose outcome can be worked out."""
    own = {"weighting": "uniform", **(parameters or {})}
    of = plan(method, own, **{"optimizer": "sgd", "lr": 0.1, "batch_size": 64, "epochs": 1, **training})
    return changed_plan(of, privacy={"secure_aggregation": True}).model_copy(update={"weights_sha256": NOBODY_HAS})


@dataclass
class Hospitals:
    """Hospitals that know one another's keys and send nothing but under masks.

    Attributes:
        counts: Name -> training images, where these are not 40.
        refusals: What they said instead of answers.
    """

    folder: Path
    names: Sequence[str] = NAMES
    counts: Mapping[str, int] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in self.names}
        lines = {name: format_public_key_line(key, "") for name, key in keys.items()}
        policy = SitePolicy(**{"masked_only": True, "peers": lines, "smallest_count": 0, **self.policy})
        self.sites, self.apps = dict[str, Site](), dict[str, ClientApp]()
        for seed, name in enumerate(self.names):
            classes, count = self.class_names.get(name, OWN), self.counts.get(name, 40)
            self.sites[name] = Site(
                LabelDeclaration(name, classes),
                *(images(10 * seed + part, count, classes) for part in range(3)),
                self.folder / name,
                durable=False,
                policy=policy,
                identity=SiteSigningIdentity(keys[name], lines[name]),
            )
        self.start(self.names)

    def start(self, names: Iterable[str]) -> None:
        """Start these hospitals' processes: what was in memory only is gone."""
        self.apps |= {name: make_client_app(lambda context, name=name: self.sites[name]) for name in names}

    def change(self, name: str, **changes: Any) -> None:
        """Start a hospital's process with other values of its site."""
        self.sites[name] = replace(self.sites[name], **changes)
        self.start([name])

    def send(
        self, name: str, kind: str, record: Record, expected: type[AnyRecord], app: ClientApp | None = None
    ) -> AnyRecord | None:
        """The answer of one hospital's app, or of another app in its place; None where it is a refusal."""
        message = make_request(encode_record(record), 2, kind)
        try:
            reply = (app or self.apps[name])(message, Context(1, 2, {}, RecordDict(), {}))
        except (ValueError, BadInput) as error:
            self.refusals.append(f"{name}: {error}")
            return None
        if reply.has_error():
            self.refusals.append(f"{name}: {reply.error.reason}")
            return None
        return decode_record(reply.content, expected)

    def rows(self, name: str, of: HospitalPlan) -> tuple[str, ...]:
        """The head rows that a hospital is sent."""
        every = tuple(sorted({row for site in self.sites for row in self.class_names.get(site, OWN)}))
        return self.class_names.get(name, OWN) if build_site_method(of).payload.rows == "own" else every

    def train_request(self, of: HospitalPlan, name: str, server_round: int = 1, run: str = "run") -> TrainRequest:
        """The request of an honest coordinator to a hospital, from the run's first model."""
        whole = beginning(of, tuple(sorted({row for site in self.sites for row in self.rows(site, of)})))
        own = ModelState(whole.trunk, whole.norm, whole.head.select_rows(self.rows(name, of)))
        return replace(request(of, own, server_round), run=run)

    def trained(
        self, of: HospitalPlan, members: Sequence[str], server_round: int, change: Change, run: str = "run"
    ) -> dict[str, TrainReply]:
        """Have hospitals train."""
        requests = {name: change(name, self.train_request(of, name, server_round, run)) for name in members}
        replies = {name: self.send(name, "train", requests[name], TrainReply) for name in members}
        return {name: reply for name, reply in replies.items() if reply is not None}

    def opened(
        self,
        of: HospitalPlan,
        members: Sequence[str] = (),
        server_round: int = 1,
        change: Change = honest,
        lost: Mapping[str, type] | None = None,
        run: str = "run",
    ) -> UnmaskedSum:
        """A whole masked round, as the coordinator leads it.

        Args:
            change: Change of each message, those to train included.
            lost: Hospital -> the first message that does not reach it any more.

        Raises:
            MaskingFailed: If the hospitals refuse.
        """
        method = build_site_method(of)
        replies = self.trained(of, members or tuple(self.sites), server_round, change, run)
        model = beginning(of, OWN)
        layout = UpdateVectorLayout(
            len(model.trunk), len(model.norm) if method.parts.sends_batch_norm else 0, model.head.features
        )
        rows = {name: tuple(sorted(self.rows(name, of))) if method.payload.head else () for name in replies}
        classes = tuple(sorted({row for own in rows.values() for row in own}))
        numbers = choose_max_update_value(of, method), make_distributed_noise(of, method)
        return self.unmask(MaskedSumRequest(run, server_round, rows, classes, layout, *numbers), change, lost or {})

    def unmask(
        self, summation: MaskedSumRequest, change: Change = honest, lost: Mapping[str, type] | None = None
    ) -> UnmaskedSum:
        """Lead the stages of a masked sum."""
        stages, lost = list(STAGE_BY_REQUEST), lost or {}

        def ask(
            requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
        ) -> Iterator[tuple[str, AnyRecord]]:
            for name, record in requests.items():
                kind = type(record)
                if name not in lost or stages.index(kind) < stages.index(lost[name]):
                    answer = self.send(name, f"query.{STAGE_BY_REQUEST[kind]}", change(name, record), expected)
                    if answer is not None:
                        yield name, answer

        return MaskedSummation(summation, ask).unmask_sum()

    def plain(self, of: HospitalPlan, name: str, change: Change = honest) -> np.ndarray:
        """The update that a hospital would send without masks, as one vector."""
        return self.bare(name, change(name, self.train_request(of, name))).astype(np.float64)

    def bare(self, name: str, train: TrainRequest) -> np.ndarray:
        """The update of a hospital that took part in nothing before, for a request without masks."""
        unmasked = changed_plan(HospitalPlan.model_validate_json(train.plan), privacy={"secure_aggregation": False})
        folder = self.folder / "bare" / name
        train = replace(train, plan=unmasked.model_dump_json(), run=f"bare-{len(list(folder.glob('*')))}")
        policy = SitePolicy(smallest_count=0, networks=("*",))
        site = replace(self.sites[name], folder=folder / train.run, policy=policy)
        reply = self.send(name, "train", train, TrainReply, make_client_app(lambda context: site))
        assert reply is not None, self.refusals[-1]
        return flatten_update(reply.update)[2]


def integers(vector: np.ndarray, part: float, largest: float = 16.0) -> np.ndarray:
    """An update in fixed point, worked out here once more."""
    return np.rint(np.clip(vector, -largest, largest) * part * (FIXED_POINT_ONE / largest)).astype(np.int64)
