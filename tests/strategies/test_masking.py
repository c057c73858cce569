"""Secure aggregation without a network: sums to the bit, no matter who is lost, and what a site never does."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.models.network import Head
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.common.wire.codec import AnyRecord, decode_record, encode_record
from polyclinic.common.wire.records import ModelGroups, Record
from polyclinic.common.wire.secure_aggregation import (
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesRequest,
)
from polyclinic.strategies.privacy.secure_aggregation.coordinator import (
    MaskedSummation,
    MaskedSumRequest,
    MaskingFailed,
    UnmaskedSum,
)
from polyclinic.strategies.privacy.secure_aggregation.crypto import (
    add_mask_to_vector,
    compute_shared_secret,
    encode_public_key_hex,
    read_masking_statement,
)
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import (
    MaskedRoundRecord,
    MaskedRoundStore,
    count_needed_survivors,
)
from polyclinic.strategies.privacy.secure_aggregation.site import (
    MaskingConditions,
    MaskingRefused,
    SiteMaskingRound,
    SiteSigningIdentity,
)
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    BODY_SEGMENT,
    FIXED_POINT_ONE,
    UpdateVectorLayout,
    compute_share_threshold,
    convert_from_fixed_point,
    convert_to_fixed_point,
    count_out_of_range_values,
    flatten_update,
    group_rows_into_segments,
)

LAYOUT = UpdateVectorLayout(trunk=5, norm=2, features=3)
STAGES = (KeysRequest, SharesRequest, MaskedRequest, RevealRequest)
NEVER = len(STAGES)
NAMES = ("ash", "birch", "cedar", "elm", "fir", "oak", "yew")
THREE = NAMES[:3]
TERMS = MaskingConditions(8.0)


def update_of(seed: int, rows: tuple[str, ...]) -> ModelGroups:
    """Numbers of both signs, none like another; rows in an order of the site's own."""
    numbers = np.random.default_rng(seed).normal(size=7 + 4 * len(rows)).astype(np.float32)
    own = tuple(reversed(rows))
    head = Head(own, numbers[7 : 7 + 3 * len(rows)].reshape(-1, 3), numbers[7 + 3 * len(rows) :]) if rows else None
    return ModelGroups(numbers[:5], numbers[5:7], head)


@dataclass
class Ward:
    """Sites that answer in this process; each is lost at a stage, or never.

    Attributes:
        lost_at: Site -> the first stage that it does not answer.
        answers: Every answer, as the coordinator had it.
        requested: Every stage that a site was asked for.
        cohorts: Site -> the smallest number of sites whose sum it helps to open, where it is not two.
    """

    rows: Mapping[str, Sequence[str]]
    lost_at: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False
    cohorts: Mapping[str, int] = field(default_factory=dict)
    sites: dict[str, SiteMaskingRound] = field(default_factory=dict)
    answers: list[tuple[str, Record]] = field(default_factory=list)
    requested: list[type] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = {site: tuple(names) for site, names in self.rows.items()}
        for seed, (site, rows) in enumerate(self.rows.items()):
            terms = MaskingConditions(largest=8.0, alone=self.alone, cohort=self.cohorts.get(site, 2))
            self.sites[site] = SiteMaskingRound("run", 3, site, update_of(seed, rows), terms)

    def __call__(
        self, requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
    ) -> Iterator[tuple[str, AnyRecord]]:
        for site, request in requests.items():
            stage = STAGES.index(type(request))
            self.requested.append(type(request))
            if self.lost_at.get(site, NEVER) > stage:
                state = self.sites[site]
                answer = (
                    state.answer_with_keys,
                    state.answer_with_shares,
                    state.answer_with_masked_update,
                    state.answer_with_revealed_shares,
                )[stage](request)
                self.answers.append((site, answer))
                yield site, decode_record(encode_record(answer), expected)

    @property
    def request(self) -> MaskedSumRequest:
        classes = tuple(sorted({name for rows in self.rows.values() for name in rows}))
        return MaskedSumRequest("run", 3, self.rows, classes, LAYOUT, 8.0)

    @property
    def masked_vectors(self) -> list[np.ndarray]:
        return [answer.vector for _, answer in self.answers if isinstance(answer, MaskedAnswer)]

    def opened(self) -> UnmaskedSum:
        return MaskedSummation(self.request, self).unmask_sum()

    def plain_sum(self, opened: UnmaskedSum) -> list[int]:
        """The sum of the survivors' fixed-point numbers, without masks, over what was opened."""
        result = np.zeros(LAYOUT.compute_vector_size(opened.request.classes), np.uint32)
        for seed, (site, rows) in enumerate(self.rows.items()):
            if self.lost_at.get(site, NEVER) > 2:
                vector = convert_to_fixed_point(flatten_update(update_of(seed, rows))[2], len(self.rows), 8.0)
                result[:7] += vector[:7]
                for place, name in enumerate(rows):
                    if name in opened.rows:
                        start = 7 + 4 * opened.request.classes.index(name)
                        result[start : start + 4] += vector[7 + 4 * place : 11 + 4 * place]
        return result.tolist()


@st.composite
def wards(draw: st.DrawFn) -> Ward:
    """Up to seven sites of any classes, of whom up to a third are lost, each at any stage."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    rows = {site: sorted(draw(st.sets(st.sampled_from("abc")))) for site in names}
    lost = draw(st.permutations(names))[: draw(st.integers(0, len(names) // 3))]
    return Ward(rows, {site: draw(st.integers(0, 3)) for site in lost}, alone=draw(st.booleans()))


def relay(answers: Iterable[KeysAnswer]) -> SharesRequest:
    """The statements of these sites, as the coordinator sends them on."""
    columns = zip(*((answer.statement, answer.signature, answer.identity) for answer in answers), strict=True)
    return SharesRequest("run", 3, *columns)


def state_keys(ward: Ward, divisors: Mapping[str, int]) -> SharesRequest:
    """Each site states its keys for a round of all, and divides by its number."""
    names = tuple(divisors)
    return relay(
        ward.sites[site].answer_with_keys(KeysRequest("run", 3, names, divisor)) for site, divisor in divisors.items()
    )


@given(wards())
@settings(max_examples=25, deadline=None)
def test_masked_sums_are_plain_sums_to_the_bit_whoever_of_a_third_is_lost_at_whatever_stage(ward: Ward) -> None:
    opened = ward.opened()
    assert opened.integers.tolist() == ward.plain_sum(opened)
    assert set(opened.survivors) == {site for site in ward.rows if ward.lost_at.get(site, NEVER) > 2}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("lost", ["ash", "cedar"])
def test_one_of_three_may_be_lost_at_any_stage(stage: int, lost: str) -> None:
    ward = Ward(dict.fromkeys(THREE, "ab"), {lost: stage})
    opened = ward.opened()
    assert opened.integers.tolist() == ward.plain_sum(opened)
    assert (lost in opened.survivors) == (stage == 3)


@pytest.mark.parametrize("cohort", [4, 10_000])
def test_a_site_that_asks_for_more_sites_than_there_are_does_not_fail_the_sum_of_the_others(
    cohort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward = Ward(dict.fromkeys(THREE, "ab"), {"cedar": 1}, cohorts={"cedar": cohort})
    # Our program would decline at once; a hospital's own program may go on.
    monkeypatch.setattr(ward.sites["cedar"], "_refuse_too_few_sites", lambda sites: None)
    opened = ward.opened()
    assert opened.survivors == ("ash", "birch")
    assert opened.integers.tolist() == ward.plain_sum(opened)


def test_the_mean_is_the_plain_mean_within_the_stated_error() -> None:
    ward = Ward({"ash": "ab", "birch": "b", "cedar": "ab"})
    opened = ward.opened()
    vectors = [flatten_update(update_of(seed, rows))[2].astype(float) for seed, rows in enumerate(ward.rows.values())]
    body = sum(vector[:7] for vector in vectors) / 3
    assert np.abs(opened.vector[:7] - body).max() <= 3 * 8.0 / 2**31
    row_a = (vectors[0][7:11] + vectors[2][7:11]) / 2
    share = len(opened.rows["a"]) / opened.divisor
    assert np.abs(opened.vector[7:11] / share - row_a).max() <= 3 * 8.0 / 2**31 / share


def test_what_is_sent_shows_nothing_of_an_update() -> None:
    ward = Ward(dict.fromkeys(THREE, ""))
    ward.sites = {
        site: SiteMaskingRound("run", 3, site, ModelGroups(np.zeros(20_000, np.float32)), TERMS) for site in THREE
    }
    request = replace(ward.request, layout=UpdateVectorLayout(20_000, 0, 0))
    assert not MaskedSummation(request, ward).unmask_sum().integers.any()
    # 80,000 bytes of each site: were they all alike likely, each of 256 would be there 312 times, give or take 18.
    counts = np.stack([np.bincount(vector.view(np.uint8), minlength=256) for vector in ward.masked_vectors])
    assert counts.min() > 312 - 6 * 18
    assert counts.max() < 312 + 6 * 18


def test_a_round_makes_new_keys_and_new_masks() -> None:
    first, second = (Ward({"ash": "a", "birch": "a"}) for _ in range(2))
    assert first.opened().integers.tolist() == second.opened().integers.tolist()
    assert np.any(np.stack(first.masked_vectors) != np.stack(second.masked_vectors))


@pytest.mark.parametrize(("sites", "stay"), [(2, 2), (3, 2), (4, 3), (6, 4), (7, 5), (12, 8)])
def test_two_thirds_must_stay(sites: int, stay: int) -> None:
    assert compute_share_threshold(sites) == stay
    assert stay > sites / 2


@given(st.integers(2, 200), st.data())
def test_all_but_the_honest_sites_open_no_second_secret_of_a_site(sites: int, data: st.DataObject) -> None:
    """The honest are told two stories, each some of them; the others answer to both."""
    honest = data.draw(st.integers(2, sites))
    first = data.draw(st.integers(0, honest))
    siding, needed = sites - honest, compute_share_threshold(sites, honest)
    assert min(first, honest - first) + siding < needed
    assert compute_share_threshold(sites) <= needed <= sites
    assert needed <= max(compute_share_threshold(sites), siding + honest // 2 + 1)  # and no more than it takes


@pytest.mark.parametrize("first", range(2, 16))
def test_a_later_attempt_with_fewer_sites_needs_no_fewer_shares(first: int) -> None:
    """All but the honest side with the coordinator, which has named some of the honest as lost."""
    for honest in range(2, first + 1):
        siding, needed = first - honest, count_needed_survivors(first, honest, honest)
        for size in range(needed, first + 1):
            answering_both = size - siding  # each of them answers one of the two stories
            assert answering_both + 2 * siding < 2 * needed, (honest, size)


def test_a_site_that_goes_on_with_fewer_counts_by_those_that_were_asked_first(tmp_path: Path) -> None:
    members = NAMES[:5]
    memory = MaskedRoundStore(tmp_path, durable=False)
    memory.store_masked_round("run", 3, MaskedRoundRecord(members, divisor=6))
    site = SiteMaskingRound("run", 3, "ash", update_of(0, ()), replace(TERMS, masked=memory))
    stated = read_masking_statement(site.answer_with_keys(KeysRequest("run", 3, members, 5)).statement)
    assert (stated.members, stated.divisor) == (members, 6)
    others = [SiteMaskingRound("run", 3, name, update_of(1, ()), TERMS) for name in NAMES[1:4]]
    statements = relay([other.answer_with_keys(KeysRequest("run", 3, members, 6)) for other in others])
    with pytest.raises(MaskingRefused, match="3 of 5 sites are left, 4 are needed"):
        others[0].answer_with_shares(statements)


def test_hospitals_that_are_told_of_different_senders_divide_by_the_same() -> None:
    """Else each counts by a number of its own, which the coordinator knows, and noise of the others covers it less."""
    names = NAMES[:6]
    ward = Ward(dict.fromkeys(names, ""))
    shares = state_keys(ward, dict.fromkeys(names, 6))
    letters = {site: ward.sites[site].answer_with_shares(shares) for site in names}

    def vector_of(site: str, senders: Sequence[str]) -> np.ndarray:
        received = tuple(letters[sender].letters[letters[sender].recipients.index(site)] for sender in senders)
        vector = ward.sites[site].answer_with_masked_update(MaskedRequest("run", 3, tuple(senders), received, 7)).vector
        places = [slice(0, 7)]
        add_mask_to_vector(vector, places, ward.sites[site]._own[BODY_SEGMENT], subtract=True)
        for sender in senders:
            key = compute_shared_secret(ward.sites[site]._masking, encode_public_key_hex(ward.sites[sender]._masking))
            add_mask_to_vector(vector, places, key, subtract=site < sender)
        return vector

    few, all_others = vector_of("ash", ("birch", "cedar", "elm")), vector_of("birch", ("ash", *names[2:]))
    assert few.tolist() == convert_to_fixed_point(flatten_update(update_of(0, ()))[2], 6, 8.0).tolist()
    assert all_others.tolist() == convert_to_fixed_point(flatten_update(update_of(1, ()))[2], 6, 8.0).tolist()


@pytest.mark.parametrize("divisor", [1, 2, 5, 300])
def test_a_divisor_that_does_not_fit_the_members_is_refused(divisor: int) -> None:
    """It is at least their number, and they are two thirds of it at least."""
    with pytest.raises(MaskingRefused, match=f"of {divisor} sites, 3 are too few"):
        Ward(dict.fromkeys(THREE, "")).sites["ash"].answer_with_keys(KeysRequest("run", 3, THREE, divisor))


def test_hospitals_that_are_told_different_divisors_do_not_mask_together() -> None:
    ward = Ward(dict.fromkeys(THREE, ""))
    shares = state_keys(ward, {"ash": 4, "birch": 3, "cedar": 3})
    with pytest.raises(MaskingRefused, match="another number"):
        ward.sites["birch"].answer_with_shares(shares)


# ---------------------------------------------------------------------- beyond the threshold


@pytest.mark.parametrize(
    ("stage", "why"),
    [(0, "stated their keys"), (1, "shared their secrets"), (2, "sent a masked update"), (3, "gave their shares")],
)
def test_a_round_that_loses_two_of_three_fails_and_asks_for_nothing_more(stage: int, why: str) -> None:
    ward = Ward(dict.fromkeys(THREE, "a"), {"ash": stage, "birch": stage})
    with pytest.raises(MaskingFailed, match=rf'1 sites {why} \("cedar"\), 2 are needed\.'):
        ward.opened()
    assert ward.requested[-1] is STAGES[stage]


# ---------------------------------------------------------------------- rows of few owners


def test_a_row_of_one_owner_stays_masked() -> None:
    ward = Ward({"ash": "ab", "birch": "b", "cedar": "b"})
    opened = ward.opened()
    assert opened.closed == ("a",)
    assert not opened.vector[7:11].any()
    assert opened.rows == {"b": THREE}
    segments = [answer.segments for _, answer in ward.answers if isinstance(answer, RevealAnswer)]
    assert len(segments) == 3
    assert all("a" not in names for names in segments)


def test_a_row_whose_other_owner_is_lost_stays_masked_too() -> None:
    opened = Ward({"ash": "ab", "birch": "ab", "cedar": "b"}, {"birch": 2}).opened()
    assert opened.closed == ("a",)
    assert opened.rows == {"b": ("ash", "cedar")}


def test_the_owner_may_let_it_be_opened() -> None:
    ward = Ward({"ash": "ab", "birch": "b", "cedar": "b"}, alone=True)
    opened = ward.opened()
    assert opened.closed == ()
    assert opened.integers.tolist() == ward.plain_sum(opened)
    assert opened.vector[7:11].any()


def test_rows_of_the_same_owners_are_one_segment_and_those_of_all_go_with_the_trunk() -> None:
    segments = group_rows_into_segments({"ash": "abcd", "birch": "bcd", "cedar": "d"})
    assert [(segment.name, segment.classes, segment.owners) for segment in segments] == [
        ("", ("d",), THREE),
        ("a", ("a",), ("ash",)),
        ("b", ("b", "c"), ("ash", "birch")),
    ]


# ---------------------------------------------------------------------- what a site refuses


@dataclass
class Stages:
    """The requests of a round of three, as an honest coordinator makes them, to the first of them."""

    site: SiteMaskingRound
    shares: SharesRequest
    masked: MaskedRequest


def begun(identities: Mapping[str, SiteSigningIdentity] = {}, terms: MaskingConditions = TERMS) -> Stages:
    """Three sites that have stated their keys, and what two have written to the first."""
    ward = Ward(dict.fromkeys(THREE, ""))
    ward.sites = {
        site: SiteMaskingRound("run", 3, site, update_of(7, ()), replace(terms, identity=identities.get(site)))
        for site in THREE
    }
    shares = state_keys(ward, dict.fromkeys(THREE, 3))
    answers = [ward.sites[site].answer_with_shares(shares) for site in THREE[1:]]
    letters = tuple(answer.letters[answer.recipients.index("ash")] for answer in answers)
    return Stages(ward.sites["ash"], shares, MaskedRequest("run", 3, THREE[1:], letters, 7))


def shared_by_ash() -> Stages:
    stages = begun()
    stages.site.answer_with_shares(stages.shares)
    return stages


def masked_by_ash() -> Stages:
    stages = shared_by_ash()
    stages.site.answer_with_masked_update(stages.masked)
    return stages


def reveal(*survivors: str) -> RevealRequest:
    return RevealRequest("run", 3, survivors)


def test_of_each_site_one_secret_is_given_and_never_the_other_and_the_same_question_gets_the_same_answer() -> None:
    stages = masked_by_ash()
    assert stages.site.answer_with_masked_update(stages.masked) is stages.site.answer_with_masked_update(stages.masked)
    answer = stages.site.answer_with_revealed_shares(reveal("ash", "birch"))
    assert set(answer.owners) == {"ash", "birch"}
    assert answer.gone == ("cedar",)
    for survivors in (THREE, ("ash", "cedar")):
        with pytest.raises(MaskingRefused, match="another RevealRequest"):
            stages.site.answer_with_revealed_shares(reveal(*survivors))
    assert stages.site.answer_with_revealed_shares(reveal("ash", "birch")) is answer


def fewer(shares: SharesRequest, *places: int) -> SharesRequest:
    """The statements of these sites only."""
    columns = (shares.statements, shares.signatures, shares.identities)
    return SharesRequest("run", 3, *(tuple(column[place] for place in places) for column in columns))


@pytest.mark.parametrize(
    ("until", "call", "reason"),
    [
        (
            begun,
            lambda stages: stages.site.answer_with_keys(KeysRequest("run", 4, THREE[:2], 2)),
            "of round 3, not of 4",
        ),
        (begun, lambda stages: stages.site.answer_with_shares(fewer(stages.shares, 0)), "no other site"),
        (begun, lambda stages: stages.site.answer_with_shares(fewer(stages.shares, 1, 2)), "lack that of ash"),
        (begun, lambda stages: stages.site.answer_with_shares(fewer(stages.shares, 0, 1, 1)), "not one a site"),
        (
            shared_by_ash,
            lambda stages: stages.site.answer_with_shares(fewer(stages.shares, 0, 1)),
            "another SharesRequest",
        ),
        (
            shared_by_ash,
            lambda stages: stages.site.answer_with_masked_update(replace(stages.masked, senders=(), letters=())),
            "1 of 3 sites are left",
        ),
        (
            shared_by_ash,
            lambda stages: stages.site.answer_with_revealed_shares(reveal("ash", "birch")),
            "not sites that masked",
        ),
        (
            masked_by_ash,
            lambda stages: stages.site.answer_with_revealed_shares(reveal("ash")),
            "1 of 3 sites are left, 2 are needed.",
        ),
        (
            masked_by_ash,
            lambda stages: stages.site.answer_with_revealed_shares(reveal("birch", "cedar")),
            "not sites that masked",
        ),
        (
            masked_by_ash,
            lambda stages: stages.site.answer_with_revealed_shares(reveal("ash", "birch", "zebra")),
            "not sites that masked",
        ),
    ],
    ids=[
        *("another_round", "statements_of_one_site", "statements_of_others_only", "a_statement_twice"),
        *("a_second_list_of_statements", "too_few_senders", "revealed_before_it_masked"),
        *("too_few_survivors", "survivors_without_itself", "survivors_that_never_masked"),
    ],
)
def test_a_request_that_no_honest_coordinator_makes_is_refused(
    until: Callable[[], Stages], call: Callable[[Stages], object], reason: str
) -> None:
    with pytest.raises(MaskingRefused, match=reason):
        call(until())


def test_an_update_is_masked_for_one_set_of_sites() -> None:
    stages = masked_by_ash()
    with pytest.raises(MaskingRefused, match="another MaskedRequest"):
        stages.site.answer_with_masked_update(
            replace(stages.masked, senders=("birch",), letters=stages.masked.letters[:1])
        )
    stages.site.answer_with_revealed_shares(reveal("ash", "birch"))
    with pytest.raises(MaskingRefused, match="let it go"):
        stages.site.answer_with_masked_update(stages.masked)


def test_a_letter_from_elsewhere_is_refused() -> None:
    stages = shared_by_ash()
    with pytest.raises(ValueError, match="letter"):
        stages.site.answer_with_masked_update(replace(stages.masked, letters=tuple(reversed(stages.masked.letters))))


# ---------------------------------------------------------------------- who is who


def identity() -> SiteSigningIdentity:
    key = ec.generate_private_key(ec.SECP256R1())
    return SiteSigningIdentity(key, format_public_key_line(key, ""))


def test_statements_are_signed_with_the_admitted_key_and_a_changed_one_is_refused() -> None:
    stages = begun({site: identity() for site in THREE})
    first, second, third = stages.shares.statements
    changed = second.replace(b'"birch"', b'"maple"')
    with pytest.raises(MaskingRefused, match="not signed"):
        stages.site.answer_with_shares(replace(stages.shares, statements=(first, changed, third)))
    stages.site.answer_with_shares(stages.shares)


def test_a_site_that_knows_its_peers_takes_no_key_that_the_coordinator_made() -> None:
    identities = {site: identity() for site in THREE}
    terms = MaskingConditions(8.0, peers={site: f"{key.line} {site}@hospital" for site, key in identities.items()})
    honest = begun(identities, terms)
    honest.site.answer_with_shares(honest.shares)
    with pytest.raises(MaskingRefused, match="of cedar is signed with a key"):
        begun({**identities, "cedar": identity()}, terms)


def test_masks_that_do_not_fit_are_told_from_a_sum() -> None:
    ward = Ward(dict.fromkeys(THREE, "a"))
    honest = ward.sites["birch"].answer_with_masked_update

    def other(request: MaskedRequest) -> MaskedAnswer:
        answer = honest(request)
        return replace(answer, vector=np.random.default_rng(5).integers(0, 2**32, len(answer.vector), np.uint32))

    ward.sites["birch"].answer_with_masked_update = other
    with pytest.raises(MaskingFailed, match="the sum is not one of updates"):
        ward.opened()


# ---------------------------------------------------------------------- fixed point


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=1), st.integers(1, 1000))
def test_a_number_comes_back_within_half_a_step(numbers: list[float], divisor: int) -> None:
    update = np.array(numbers, np.float32)
    back = convert_from_fixed_point(convert_to_fixed_point(update, divisor, 8.0), 8.0)
    clipped = np.clip(update.astype(np.float64), -8, 8) / divisor
    assert np.abs(back - clipped).max() <= 8.0 / FIXED_POINT_ONE / 2 * (1 + 1e-6)
    assert count_out_of_range_values(update, 8.0) == sum(abs(number) > 8 for number in numbers)


def test_fixed_point_by_hand_and_nothing_that_is_not_finite() -> None:
    # r = 8, two sites: one step is 8 / 2**30; 1.5 * 0.5 = 0.75 = 0.75 / 8 * 2**30 = 100663296 steps.
    steps = convert_to_fixed_point(np.array([1.5, -1.5, 100.0], np.float32), 2, 8.0)
    assert steps.view(np.int32).tolist() == [100663296, -100663296, 2**29]
    with pytest.raises(ValueError, match="not finite"):
        convert_to_fixed_point(np.array([np.nan], np.float32), 1, 8.0)
