"""Hospitals whose real gate and app answer a coordinator that may send each of them something else."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from client.app import client_app
from client.site.policy import Policy
from client.site.site import Site
from common.config import Plan
from common.contract import Declaration
from common.errors import BadInput
from common.models.state import ModelState
from common.security.identity import public_key_line
from common.wire.codec import R, decode, encode
from common.wire.records import Record, TrainReply, TrainRequest
from common.wire.secure_aggregation import STAGES
from strategies.privacy.secure_aggregation.coordinator import MaskedSummation, SumRequest, UnmaskedSum
from strategies.privacy.secure_aggregation.noise_shares import make_noise_shares
from strategies.privacy.secure_aggregation.site import SigningIdentity
from strategies.privacy.secure_aggregation.vectors import ONE, SegmentLayout, flatten_update, max_update_value
from strategies.registry import build_site_method
from tests.client.rounds import OWN, beginning, images, plan, request

NAMES = ("ash", "birch", "cedar")
NOBODY_HAS = "0" * 64
"""A weights file named by a plan: no hospital compares the first model, and masks have to do without that."""
Change = Callable[[str, Any], Any]
"""Site and request -> the request that this site gets instead."""


def honest(site: str, asked: Any) -> Any:
    """Change nothing."""
    return asked


def forged(record: Any, **fields: Any) -> Any:
    """A record with other fields that nothing checked: a coordinator need not run our code."""
    made = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def masked_plan(method: str = "vanilla", parameters: Mapping[str, Any] | None = None, **training: Any) -> Plan:
    """One local step of plain descent, so that what comes of it can be worked out."""
    own = {"weighting": "uniform", **(parameters or {})}
    made = plan(method, own, optimizer="sgd", lr=0.1, batch_size=64, epochs=1, **training)
    privacy = made.privacy.model_copy(update={"secure_aggregation": True})
    return made.model_copy(update={"privacy": privacy, "weights_sha256": NOBODY_HAS})


@dataclass
class Hospitals:
    """Hospitals that know one another's keys and send nothing but under masks.

    Attributes:
        counts: Name -> training images.
        refusals: What they said instead of answers.
    """

    folder: Path
    counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 40))
    policy: Mapping[str, Any] = field(default_factory=dict)
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # read by Message() to fill its metadata
        keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in self.counts}
        lines = {name: public_key_line(key, "") for name, key in keys.items()}
        policy = Policy(**{"masked_only": True, "peers": lines, "smallest_count": 0, **self.policy})
        self.sites = {
            name: Site(
                Declaration(name, self.class_names.get(name, OWN)),
                *(images(10 * seed + part, count, self.class_names.get(name, OWN)) for part in range(3)),
                self.folder / name,
                durable=False,
                policy=policy,
                identity=SigningIdentity(keys[name], lines[name]),
            )
            for seed, (name, count) in enumerate(self.counts.items())
        }
        self.apps: dict[str, ClientApp] = {}
        self.start(self.sites)

    def start(self, names: Iterable[str]) -> None:
        """Start these hospitals' processes: what was in memory only is gone."""
        self.apps |= {name: client_app(partial(_only, self.sites[name])) for name in names}

    def asked(self, name: str, kind: str, record: Record, expected: type[R], app: ClientApp | None = None) -> R | None:
        """The answer of one hospital's app, or of another app in its place; None where it is a refusal."""
        message = Message(encode(record), 2, kind)
        try:
            reply = (app or self.apps[name])(message, Context(1, 2, {}, RecordDict(), {}))
        except (ValueError, BadInput) as error:
            self.refusals.append(f"{name}: {error}")
            return None
        if reply.has_error():
            self.refusals.append(f"{name}: {reply.error.reason}")
            return None
        return decode(reply.content, expected)

    def rows(self, name: str, of: Plan) -> tuple[str, ...]:
        """The head rows that a hospital is sent."""
        everything = tuple(sorted({one for site in self.sites for one in self.class_names.get(site, OWN)}))
        return self.class_names.get(name, OWN) if build_site_method(of).traffic.rows == "own" else everything

    def asked_to_train(self, of: Plan, name: str, server_round: int, run: str = "run") -> TrainRequest:
        """What an honest coordinator asks a hospital in a round, from the run's first model."""
        whole = beginning(of, tuple(sorted({row for site in self.sites for row in self.rows(site, of)})))
        own = ModelState(whole.trunk, whole.norm, whole.head.rows(self.rows(name, of)))
        return replace(request(of, own, server_round), run=run)

    def trained(
        self, of: Plan, members: Sequence[str], server_round: int, change: Change, run: str = "run"
    ) -> dict[str, TrainReply]:
        """Have hospitals train."""
        found = {}
        for name in members:
            made = self.asked_to_train(of, name, server_round, run)
            reply = self.asked(name, "train", change(name, made), TrainReply)
            if reply is not None:
                found[name] = reply
        return found

    def opened(
        self,
        of: Plan,
        members: Sequence[str] = (),
        server_round: int = 1,
        change: Change = honest,
        lost: Mapping[str, type] | None = None,
        run: str = "run",
    ) -> UnmaskedSum:
        """A whole masked round, as the coordinator leads it.

        Args:
            change: What the coordinator makes of each request, those to train included.
            lost: Hospital -> the first request that it gets no more.

        Raises:
            MaskingFailed: If the hospitals refuse.
        """
        method = build_site_method(of)
        replies = self.trained(of, members or tuple(self.sites), server_round, change, run)
        model = beginning(of, OWN)
        layout = SegmentLayout(len(model.trunk), len(model.norm) if method.sends_norm else 0, model.head.features)
        rows = {name: tuple(sorted(self.rows(name, of))) if method.traffic.head else () for name in replies}
        classes = tuple(sorted({one for names in rows.values() for one in names}))
        stages, gone = list(STAGES), lost or {}

        def ask(requests: Mapping[str, Record], expected: type[R], enough: int) -> Iterator[tuple[str, R]]:
            for name, one in requests.items():
                if name in gone and stages.index(type(one)) >= stages.index(gone[name]):
                    continue
                answer = self.asked(name, f"query.{STAGES[type(one)]}", change(name, one), expected)
                if answer is not None:
                    yield name, answer

        numbers = max_update_value(of, method), make_noise_shares(of, method)
        return MaskedSummation(SumRequest(run, server_round, rows, classes, layout, *numbers), ask).opened()

    def plain(self, of: Plan, name: str, change: Change = honest) -> np.ndarray:
        """The update that a hospital would send without masks, as one vector."""
        return self.bare(name, change(name, self.asked_to_train(of, name, 1))).astype(np.float64)

    def bare(self, name: str, asked: TrainRequest) -> np.ndarray:
        """What a hospital that took part in nothing before would send for a request without masks."""
        plan_ = Plan.model_validate_json(asked.plan)
        unmasked = plan_.model_copy(update={"privacy": plan_.privacy.model_copy(update={"secure_aggregation": False})})
        folder = self.folder / "bare" / name
        alike = replace(asked, plan=unmasked.model_dump_json(), run=f"bare-{len(list(folder.glob('*')))}")
        site = replace(self.sites[name], folder=folder / alike.run, policy=Policy(smallest_count=0, networks=("*",)))
        reply = self.asked(name, "train", alike, TrainReply, client_app(partial(_only, site)))
        assert reply is not None, self.refusals[-1]
        return flatten_update(reply.update)[2]


def _only(site: Site, context: Context) -> Site:
    return site


def integers(vector: np.ndarray, part: float, largest: float) -> np.ndarray:
    """An update in fixed point, worked out here once more."""
    return np.rint(np.clip(vector, -largest, largest) * part * (ONE / largest)).astype(np.int64)
