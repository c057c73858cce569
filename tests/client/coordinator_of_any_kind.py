"""A coordinator that may change every message of masked rounds, and works out all that the answers give away.

The hospitals' app, gate, policy, training and masks are the real ones. What they train is chosen to help the attacker:
a linear network, in which a dead trunk, dead rows or a learning rate of nothing leave an update of zeros, and images
of which each hospital has other pixels lit, so that the updates of two hospitals have no number in common.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.common.config import HospitalPlan
from polyclinic.common.models.network import Head
from polyclinic.common.plugins import MODELS, PLUGIN_PREFIX, identify_plugin, register_local_plugin
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.common.wire import secure_aggregation as wire
from polyclinic.common.wire.records import ModelGroups, TrainReply, TrainRequest
from polyclinic.data.base.image_set import ImageSet
from polyclinic.strategies.privacy.secure_aggregation import crypto
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    BODY_SEGMENT,
    UpdateVectorLayout,
    convert_from_fixed_point,
    convert_to_fixed_point,
    group_rows_into_segments,
)
from tests.client.masked import NOBODY_HAS, Hospitals
from tests.client.rounds import changed_plan

SIDE, BACKGROUND, LIT_ROWS = 16, 128, 3
LAYOUT = UpdateVectorLayout(trunk=20 * SIDE * SIDE, norm=0, features=20)
NO_NORM = np.zeros(0, np.float32)
STRANGER = ec.generate_private_key(ec.SECP256R1())
Found = tuple[str, frozenset[str]]
"""Part of the model, :data:`BODY_SEGMENT` or a class, and the sites whose sum of it is open."""


def linear_network(channels: int, image_size: int) -> nn.Module:
    """Images ``(batch, channels, image_size, image_size)`` in, 20 linear features of what is not background out."""

    class Lit(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1) - images[:, :1, 0, 0]

    return nn.Sequential(Lit(), nn.Linear(channels * image_size**2, LAYOUT.features, bias=False))


NETWORK = register_local_plugin(MODELS, linear_network)


def of_linear_network(plan: HospitalPlan) -> HospitalPlan:
    """The plan, for the network above; its one step is long, so that updates are far above the masks' grid."""
    of = changed_plan(plan, model={"architecture": PLUGIN_PREFIX + NETWORK, "neck": None}, training={"lr": 1.0})
    return of.model_copy(update={"plugins": (identify_plugin(MODELS, NETWORK),), "weights_sha256": NOBODY_HAS})


def with_own_pixels(images: ImageSet, number: int) -> ImageSet:
    """Images of which only three rows of pixels are lit, other ones for each hospital; nobody lights the first."""
    stored, first = np.full_like(images.stored, BACKGROUND), 1 + LIT_ROWS * number
    stored[:, first : first + LIT_ROWS] = images.stored[:, first : first + LIT_ROWS]
    return replace(images, stored=stored)


@dataclass(frozen=True)
class Script:
    """What the coordinator does in one attempt at a round; a site that a mapping lacks gets the honest message.

    Attributes:
        model: Number of the model that all sites start from.
        changed: Site -> what else its request to train says.
        members, relayed, letters, survivors: Site -> the sites that are named to it in each message.
        divisors: Site -> what it is asked to divide its update by.
        forged: Site -> what is done to the statements that are relayed to it.
        restarted: Sites whose processes start anew before.
        forgetful: A site whose folder is brought back from before the first round.
    """

    run: str = "run"
    round: int = 1
    model: int = 0
    changed: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    relayed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    letters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    survivors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    divisors: Mapping[str, int] = field(default_factory=dict)
    forged: Mapping[str, str] = field(default_factory=dict)
    restarted: tuple[str, ...] = ()
    forgetful: str = ""


CHANGED = ("trunk", "rows", "lr", "bound", "weighting", "contract", "round", "run", "counted", "statistics", "again")
FORGED = ("divisor", "plan", "members", "stranger", "twice", "earlier", "cohort")


@dataclass
class Attempt:
    """What came of one attempt.

    Attributes:
        updates: Site -> the update that it masked, as one vector.
        vectors: Site -> its masked answer.
        fellows: Site -> the sites that it masked with.
    """

    statements: dict[str, crypto.MaskingStatement] = field(default_factory=dict)
    updates: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    vectors: dict[str, wire.Integers] = field(default_factory=dict)
    fellows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    revealed: list[wire.RevealAnswer] = field(default_factory=list)


def _place(rows: tuple[str, ...], part: str) -> slice:
    return next(LAYOUT.iterate_class_slices(rows, () if part == BODY_SEGMENT else (part,), body=part == BODY_SEGMENT))


class AnyCoordinator:
    """Leads attempts, as their scripts say."""

    def __init__(self, hospitals: Hospitals, plan: HospitalPlan, rows: Mapping[str, tuple[str, ...]]) -> None:
        self._here, self._plan, self._rows = hospitals, plan, rows
        self._classes = tuple(sorted({name for names in rows.values() for name in names}))
        self._stated: dict[str, wire.KeysAnswer] = {}
        self.attempts: list[Attempt] = []

    def lead(self, script: Script) -> Attempt:
        """Put every question to every site, and keep what they say."""
        for name in filter(None, (script.forgetful,)):
            for path in (self._here.sites[name].folder / "masked").glob("*"):
                path.unlink()
        self._here.start(script.restarted)
        attempt, every = Attempt(), tuple(self._here.sites)
        for name in every:
            request = self._request(script, name)
            for _ in range(1 + (script.changed.get(name) == "again")):
                if self._here.send(name, "train", request, TrainReply) is not None:
                    attempt.updates[name] = self._here.bare(name, request)
        earlier, self._stated = self._stated, {}
        about = script.run, script.round
        for name in every:
            members = script.members.get(name, every)
            request = wire.KeysRequest(*about, members, script.divisors.get(name, len(members)))
            answer = self._here.send(name, "query.masking_keys", request, wire.KeysAnswer)
            if answer is not None:
                self._stated[name] = answer
        attempt.statements = {
            name: crypto.read_masking_statement(keys.statement) for name, keys in self._stated.items()
        }
        letters = self._letters(script, earlier)
        for name in letters:
            self._mask(script, name, letters, attempt)
        for name in attempt.vectors:
            request = wire.RevealRequest(*about, script.survivors.get(name, tuple(attempt.vectors)))
            answer = self._here.send(name, "query.unmasking", request, wire.RevealAnswer)
            attempt.revealed += [answer] if answer is not None else []
        self.attempts.append(attempt)
        return attempt

    def updates_of(self, part: str) -> Iterator[NDArray[np.float32]]:
        """One part of every update that a hospital masked."""
        for attempt in self.attempts:
            for name, update in attempt.updates.items():
                if part == BODY_SEGMENT or part in self._rows[name]:
                    yield update[_place(self._rows[name], part)]

    def _request(self, script: Script, name: str) -> TrainRequest:
        generator = np.random.default_rng(script.model)
        trunk = 0.1 * generator.normal(size=LAYOUT.trunk).astype(np.float32)
        weight, bias = generator.normal(size=(len(self._classes), 20)), generator.normal(size=len(self._classes))
        whole = Head(self._classes, weight.astype(np.float32), bias.astype(np.float32))
        head, plan = whole.select_rows(self._rows[name]), self._plan
        honest = TrainRequest(
            *(script.run, script.round, plan.model_dump_json(), "contract", head.class_names, 0, -1, ""),
            ModelGroups(trunk, NO_NORM, head),
            {},
        )
        others = {
            "lr": changed_plan(plan, training={"lr": 1e-30}),
            "bound": changed_plan(plan, privacy={"max_update_value": 1e30}),
            "weighting": plan.model_copy(update={"method": {"weighting": "samples"}}),
        }
        changes: Mapping[str, Mapping[str, Any]] = {
            **{name: {"plan": other.model_dump_json()} for name, other in others.items()},
            "trunk": {"model": ModelGroups(trunk * 0, NO_NORM, head)},
            "rows": {"model": ModelGroups(trunk, NO_NORM, replace(head, weight=head.weight * 0))},
            "contract": {"contract": "another"},
            "round": {"round": script.round + 1},
            "run": {"run": "a-third"},
            "counted": {"counted": 7},
            "statistics": {"statistics": {"factor": np.zeros(1, np.float32)}},
        }
        return replace(honest, **changes.get(script.changed.get(name, ""), {}))

    def _letters(self, script: Script, earlier: Mapping[str, wire.KeysAnswer]) -> dict[str, wire.SharesAnswer]:
        letters = {}
        for name in self._stated:
            senders = script.relayed.get(name, tuple(self._stated))
            chosen = [self._stated[sender] for sender in senders if sender in self._stated]
            relayed = list(_forged(script.forged.get(name, ""), name, chosen, earlier))
            columns = [
                tuple(getattr(keys, field) for keys in relayed) for field in ("statement", "signature", "identity")
            ]
            request = wire.SharesRequest(script.run, script.round, *columns)
            answer = self._here.send(name, "query.masking_shares", request, wire.SharesAnswer)
            if answer is not None:
                letters[name] = answer
        return letters

    def _mask(self, script: Script, name: str, letters: Mapping[str, wire.SharesAnswer], attempt: Attempt) -> None:
        written = {site: dict(zip(item.recipients, item.letters, strict=True)) for site, item in letters.items()}
        chosen = script.letters.get(name, tuple(letters))
        senders = tuple(sorted(site for site in chosen if site != name and name in written.get(site, {})))
        sealed = tuple(written[site][name] for site in senders)
        request = wire.MaskedRequest(
            script.run, script.round, senders, sealed, LAYOUT.compute_vector_size(self._rows[name])
        )
        answer = self._here.send(name, "query.masked_update", request, wire.MaskedAnswer)
        if answer is not None and name in attempt.updates:
            attempt.vectors[name], attempt.fellows[name] = answer.vector, senders


def _forged(
    how: str, to: str, chosen: list[wire.KeysAnswer], earlier: Mapping[str, wire.KeysAnswer]
) -> Iterator[wire.KeysAnswer]:
    """Yield what is relayed to a site in the place of these statements."""
    for keys in chosen:
        stated = crypto.read_masking_statement(keys.statement)
        changes: Mapping[str, Any] = {
            "divisor": {"divisor": 7},
            "plan": {"plan": "0" * 64, "model": "0" * 64},
            "members": {"members": stated.members[:-1]},
            "cohort": {"cohort": 1, "alone": True},
            "stranger": {"masking_key": stated.sealing_key, "sealing_key": stated.masking_key},
        }
        if keys.site == to:
            yield keys
        elif how in changes:
            text = stated.model_copy(update=changes[how]).bytes_to_sign()
            own = {
                "signature": crypto.sign_masking_statement(text, STRANGER),
                "identity": format_public_key_line(STRANGER, ""),
            }
            yield replace(keys, statement=text, **(own if how == "stranger" else {}))
        else:
            yield earlier.get(keys.site, keys) if how == "earlier" else keys
            yield from [keys] * (how == "twice")


def open_sums(
    attempt: Attempt, rows: Mapping[str, tuple[str, ...]], largest: float
) -> dict[Found, NDArray[np.float64]]:
    """Every sum of some sites' numbers that can be worked out of an attempt, of updates in full.

    Args:
        largest: Bound of one number, to which the grid of the masks is scaled.
    """
    masks, keys = _secrets(attempt)
    unmasked = {name: _without_known_masks(name, attempt, rows, masks, keys) for name in attempt.vectors}
    sums = {}
    for size in range(1, len(unmasked) + 1):
        for sites in map(frozenset, combinations(sorted(unmasked), size)):
            for part in (BODY_SEGMENT, *sorted({name for site in sites for name in rows[site]})):
                owners = frozenset(site for site in sites if part == BODY_SEGMENT or part in rows[site])
                places = {site: _place(rows[site], part) for site in owners}
                by = {site: attempt.statements[site].divisor for site in owners}
                total = sum((unmasked[site][place] for site, place in places.items()), np.uint32(0))
                updates = {site: attempt.updates[site][place] for site, place in places.items()}
                fixed = [convert_to_fixed_point(update, by[site], largest) for site, update in updates.items()]
                if np.array_equal(total, sum(fixed, np.uint32(0))):
                    sums[(part, owners)] = convert_from_fixed_point(np.asarray(total), largest) * max(by.values())
    return sums


def _without_known_masks(
    name: str,
    attempt: Attempt,
    rows: Mapping[str, tuple[str, ...]],
    masks: Mapping[Any, bytes],
    keys: Mapping[str, Any],
) -> wire.Integers:
    """Return a site's masked vector without those of its masks that shares make known."""
    vector = attempt.vectors[name].copy()
    for segment in group_rows_into_segments({site: rows[site] for site in attempt.statements}):
        if name in segment.owners and (name, segment.name) in masks:
            places = LAYOUT.iterate_class_slices(rows[name], segment.classes, body=segment.is_body_segment)
            crypto.add_mask_to_vector(vector, places, masks[(name, segment.name)], subtract=True)
    for other in attempt.fellows[name]:
        for ours, theirs in ((name, other), (other, name)):
            if ours in keys:
                shared = crypto.compute_shared_secret(keys[ours], attempt.statements[theirs].masking_key)
                common = tuple(row for row in rows[name] if row in rows[other])
                crypto.add_mask_to_vector(
                    vector, LAYOUT.iterate_class_slices(rows[name], common, body=True), shared, subtract=name < other
                )
                break
    # A mask that two sites have in common and that nobody else knows cancels in their sum.
    return vector


def _secrets(attempt: Attempt) -> tuple[dict[tuple[str, str], bytes], dict[str, ec.EllipticCurvePrivateKey]]:
    """Join the sites' own masks and keys of which enough shares were revealed."""
    shares_of_masks = defaultdict[tuple[str, str], list[bytes]](list)
    shares_of_keys = defaultdict[str, list[bytes]](list)
    for answer in attempt.revealed:
        for owner, segment, share in zip(answer.owners, answer.segments, answer.shares, strict=True):
            shares_of_masks[owner, segment].append(share)
        for gone, share in zip(answer.gone, answer.key_shares, strict=True):
            shares_of_keys[gone].append(share)
    masks, keys = {}, {}
    for part, shares in shares_of_masks.items():
        with suppress(crypto.SecretsError):  # too few of them
            masks[part] = crypto.recover_secret_from_shares(shares)
    for gone, shares in shares_of_keys.items():
        with suppress(crypto.SecretsError):
            keys[gone] = crypto.deserialize_private_key(
                crypto.recover_secret_from_shares(shares), attempt.statements[gone].masking_key
            )
    return masks, keys
