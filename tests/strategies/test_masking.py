"""Secure aggregation without a network: sums to the bit, no matter who is lost, and what a site never does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.network import Head
from common.security.identity import public_key_line
from common.wire.codec import R, decode, encode
from common.wire.records import Groups, Record
from common.wire.secure_aggregation import (
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from strategies.privacy.secure_aggregation.coordinator import MaskedSummation, MaskingFailed, SumRequest, UnmaskedSum
from strategies.privacy.secure_aggregation.crypto import add_mask, agree_secret, public_key_hex, read_statement
from strategies.privacy.secure_aggregation.masked_rounds import MaskedRound, MaskedRoundMemory, count_needed_survivors
from strategies.privacy.secure_aggregation.site import MaskingRefused, ParticipationTerms, SigningIdentity, SiteRound
from strategies.privacy.secure_aggregation.vectors import (
    BODY,
    ONE,
    SegmentLayout,
    compute_share_threshold,
    convert_from_fixed_point,
    convert_to_fixed_point,
    count_out_of_range,
    flatten_update,
    list_segments,
)

LAYOUT = SegmentLayout(trunk=5, norm=2, features=3)
STAGES = (KeysRequest, SharesRequest, MaskedRequest, RevealRequest)
NEVER = len(STAGES)
NAMES = ("ash", "birch", "cedar", "elm", "fir", "oak", "yew")


def update_of(seed: int, rows: tuple[str, ...]) -> Groups:
    """Numbers of both signs, none like another; rows in an order of the site's own."""
    numbers = np.random.default_rng(seed).normal(size=7 + 4 * len(rows)).astype(np.float32)
    own = tuple(reversed(rows))
    head = Head(own, numbers[7 : 7 + 3 * len(rows)].reshape(-1, 3), numbers[7 + 3 * len(rows) :]) if rows else None
    return Groups(numbers[:5], numbers[5:7], head)


@dataclass
class Ward:
    """Sites that answer in this process; each is lost at a stage, or never.

    Attributes:
        lost_at: Site -> the first stage that it does not answer.
        said: Every answer, as the coordinator had it.
        asked_of: Every stage that anybody was asked for.
    """

    rows: Mapping[str, tuple[str, ...]]
    lost_at: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False
    sites: dict[str, SiteRound] = field(default_factory=dict)
    said: list[tuple[str, Record]] = field(default_factory=list)
    asked_of: list[type] = field(default_factory=list)

    def __post_init__(self) -> None:
        for seed, (site, rows) in enumerate(self.rows.items()):
            terms = ParticipationTerms(largest=8.0, alone=self.alone)
            self.sites[site] = SiteRound("run", 3, site, update_of(seed, rows), terms)

    def __call__(self, requests: Mapping[str, Record], expected: type[R], enough: int) -> Iterator[tuple[str, R]]:
        for site, request in requests.items():
            stage = STAGES.index(type(request))  # type: ignore[arg-type]
            self.asked_of.append(type(request))
            if self.lost_at.get(site, NEVER) > stage:
                one = self.sites[site]
                said = (one.keys, one.shares, one.masked, one.reveal)[stage](request)  # type: ignore[operator]
                self.said.append((site, said))
                yield site, decode(encode(said), expected)

    @property
    def asked(self) -> SumRequest:
        classes = tuple(sorted({name for rows in self.rows.values() for name in rows}))
        return SumRequest("run", 3, self.rows, classes, LAYOUT, 8.0)

    def opened(self) -> UnmaskedSum:
        return MaskedSummation(self.asked, self).opened()

    def plain_sum(self, opened: UnmaskedSum) -> np.ndarray:
        """The sum of the survivors' fixed-point numbers, without masks, over what was opened."""
        result = np.zeros(LAYOUT.size(opened.request.classes), np.uint32)
        for seed, (site, rows) in enumerate(self.rows.items()):
            if self.lost_at.get(site, NEVER) > 2:
                vector = convert_to_fixed_point(flatten_update(update_of(seed, rows))[2], len(self.rows), 8.0)
                result[:7] += vector[:7]
                for place, name in enumerate(rows):
                    if name in opened.rows:
                        start = 7 + 4 * opened.request.classes.index(name)
                        result[start : start + 4] += vector[7 + 4 * place : 11 + 4 * place]
        return result


def ward_of(rows: Mapping[str, str], lost_at: Mapping[str, int] | None = None, *, alone: bool = False) -> Ward:
    """Sites whose classes are letters."""
    return Ward({site: tuple(names) for site, names in rows.items()}, lost_at or {}, alone)


@st.composite
def wards(draw: st.DrawFn) -> Ward:
    """Up to seven sites of any classes, of whom up to a third are lost, each at any stage."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    rows = {site: tuple(sorted(draw(st.sets(st.sampled_from("abc"))))) for site in names}
    lost = draw(st.permutations(names))[: draw(st.integers(0, len(names) // 3))]
    return Ward(rows, {site: draw(st.integers(0, 3)) for site in lost}, alone=draw(st.booleans()))


def masked_vectors(ward: Ward) -> list[list[int]]:
    return [said.vector.tolist() for _, said in ward.said if isinstance(said, MaskedAnswer)]


@given(wards())
@settings(max_examples=25, deadline=None)
def test_masked_sums_are_plain_sums_to_the_bit_whoever_of_a_third_is_lost_at_whatever_stage(ward: Ward) -> None:
    opened = ward.opened()
    assert opened.integers.tolist() == ward.plain_sum(opened).tolist()
    assert set(opened.survivors) == {site for site in ward.rows if ward.lost_at.get(site, NEVER) > 2}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("lost", ["ash", "cedar"])
def test_one_of_three_may_be_lost_at_any_stage(stage: int, lost: str) -> None:
    ward = ward_of({"ash": "ab", "birch": "ab", "cedar": "ab"}, {lost: stage})
    opened = ward.opened()
    assert opened.integers.tolist() == ward.plain_sum(opened).tolist()
    assert (lost in opened.survivors) == (stage == 3)


def test_the_mean_is_the_plain_mean_within_the_stated_error() -> None:
    ward = ward_of({"ash": "ab", "birch": "b", "cedar": "ab"})
    opened = ward.opened()
    vectors = [
        flatten_update(update_of(seed, rows))[2].astype(np.float64) for seed, rows in enumerate(ward.rows.values())
    ]
    body = sum(vector[:7] for vector in vectors) / 3
    assert np.abs(opened.vector[:7] - body).max() <= 3 * 8.0 / 2**31
    row_a = (vectors[0][7:11] + vectors[2][7:11]) / 2
    share = len(opened.rows["a"]) / opened.divisor
    assert np.abs(opened.vector[7:11] / share - row_a).max() <= 3 * 8.0 / 2**31 / share


def test_what_is_sent_shows_nothing_of_an_update() -> None:
    ward = ward_of({"ash": "", "birch": "", "cedar": ""})
    big = {
        site: SiteRound("run", 3, site, Groups(np.zeros(20_000, np.float32)), ParticipationTerms(8.0))
        for site in ward.rows
    }
    ward.sites = big
    layout = SegmentLayout(20_000, 0, 0)
    opened = MaskedSummation(replace(ward.asked, layout=layout), ward).opened()
    assert not opened.integers.any()
    sent = [said.vector for _, said in ward.said if isinstance(said, MaskedAnswer)]
    # 80,000 bytes of each site: were they all alike likely, each of 256 would be there 312 times, give or take 18.
    counts = np.stack([np.bincount(vector.view(np.uint8), minlength=256) for vector in sent])
    assert counts.min() > 312 - 6 * 18
    assert counts.max() < 312 + 6 * 18


def test_a_round_makes_new_keys_and_new_masks() -> None:
    wards_ = [ward_of({"ash": "a", "birch": "a"}) for _ in range(2)]
    assert wards_[0].opened().integers.tolist() == wards_[1].opened().integers.tolist()
    first, second = (
        [said.vector.tolist() for _, said in ward.said if isinstance(said, MaskedAnswer)] for ward in wards_
    )
    assert first != second


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
        for left in range(needed, first + 1):
            told_both = left - siding  # each of them answers one of the two stories
            assert told_both + 2 * siding < 2 * needed, (honest, left)


def test_a_site_that_goes_on_with_fewer_counts_by_those_that_were_asked_first(tmp_path: Path) -> None:
    names = NAMES[:6]
    terms = replace(TERMS, masked=MaskedRoundMemory(tmp_path, durable=False))
    MaskedRoundMemory(tmp_path, durable=False).note("run", 3, MaskedRound(names[:5], divisor=6))
    site = SiteRound("run", 3, "ash", update_of(0, ()), terms)
    stated = read_statement(site.keys(KeysRequest("run", 3, names[:5], 5)).statement)
    assert (stated.members, stated.divisor) == (names[:5], 6)
    others = {one: SiteRound("run", 3, one, update_of(1, ()), TERMS) for one in names[1:4]}
    said = [one.keys(KeysRequest("run", 3, names[:5], 6)) for one in (site, *others.values())]
    columns = [tuple(getattr(one, name) for one in said[1:]) for name in ("statement", "signature", "identity")]
    with pytest.raises(MaskingRefused, match="3 of 5 sites are left, 4 are needed"):
        others["birch"].shares(SharesRequest("run", 3, *columns))


def test_hospitals_that_are_told_of_different_senders_divide_by_the_same() -> None:
    """Else each counts by a number of its own, which the coordinator knows, and noise of the others covers it less."""
    names = ("ash", "birch", "cedar", "elm", "fir", "oak")
    ward = ward_of(dict.fromkeys(names, ""))
    said = [ward.sites[site].keys(KeysRequest("run", 3, names, 6)) for site in names]
    columns = [tuple(getattr(one, name) for one in said) for name in ("statement", "signature", "identity")]
    letters = {site: ward.sites[site].shares(SharesRequest("run", 3, *columns)) for site in names}

    def vector_of(site: str, senders: Sequence[str]) -> np.ndarray:
        written = tuple(letters[one].letters[letters[one].recipients.index(site)] for one in senders)
        sent = ward.sites[site].masked(MaskedRequest("run", 3, tuple(senders), written, 7)).vector
        places = [slice(0, 7)]
        add_mask(sent, places, ward.sites[site]._own[BODY], subtract=True)
        for one in senders:
            key = agree_secret(ward.sites[site]._masking, public_key_hex(ward.sites[one]._masking))
            add_mask(sent, places, key, subtract=site < one)
        return sent

    few, all_others = vector_of("ash", ("birch", "cedar", "elm")), vector_of("birch", ("ash", *names[2:]))
    assert few.tolist() == convert_to_fixed_point(flatten_update(update_of(0, ()))[2], 6, 8.0).tolist()
    assert all_others.tolist() == convert_to_fixed_point(flatten_update(update_of(1, ()))[2], 6, 8.0).tolist()


@pytest.mark.parametrize("divisor", [1, 2, 5, 300])
def test_a_divisor_that_does_not_fit_the_members_is_refused(divisor: int) -> None:
    """It is at least their number, and they are two thirds of it at least."""
    names = ("ash", "birch", "cedar")
    with pytest.raises(MaskingRefused, match=f"of {divisor} sites, 3 are too few"):
        ward_of(dict.fromkeys(names, "")).sites["ash"].keys(KeysRequest("run", 3, names, divisor))


def test_hospitals_that_are_told_different_divisors_do_not_mask_together() -> None:
    names = ("ash", "birch", "cedar")
    ward = ward_of(dict.fromkeys(names, ""))
    said = [ward.sites[site].keys(KeysRequest("run", 3, names, 4 if site == "ash" else 3)) for site in names]
    columns = [tuple(getattr(one, name) for one in said) for name in ("statement", "signature", "identity")]
    with pytest.raises(MaskingRefused, match="was asked to divide its update by another number"):
        ward.sites["birch"].shares(SharesRequest("run", 3, *columns))


# ---------------------------------------------------------------------- beyond the threshold


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (1, r"1 sites shared their secrets \(\"cedar\"\), 2 are needed."),
        (2, r"1 sites sent a masked update \(\"cedar\"\), 2 are needed."),
        (3, r"1 sites gave their shares \(\"cedar\"\), 2 are needed."),
    ],
)
def test_a_round_that_loses_more_fails_with_the_reason(stage: int, why: str) -> None:
    ward = ward_of({"ash": "a", "birch": "a", "cedar": "a"}, {"ash": stage, "birch": stage})
    with pytest.raises(MaskingFailed, match=why):
        ward.opened()


def test_where_too_few_masked_updates_came_nobody_is_asked_for_shares() -> None:
    ward = ward_of({"ash": "a", "birch": "a", "cedar": "a"}, {"ash": 2, "birch": 2})
    with pytest.raises(MaskingFailed):
        ward.opened()
    assert RevealRequest not in ward.asked_of


def test_nobody_but_one_is_no_sum() -> None:
    with pytest.raises(MaskingFailed, match="1 sites stated their keys"):
        ward_of({"ash": "a", "birch": "a"}, {"birch": 0}).opened()


# ---------------------------------------------------------------------- rows of few owners


def test_a_row_of_one_owner_stays_masked() -> None:
    opened = ward_of({"ash": "ab", "birch": "b", "cedar": "b"}).opened()
    assert opened.closed == ("a",)
    assert not opened.vector[7:11].any()
    assert opened.rows == {"b": ("ash", "birch", "cedar")}


def test_a_row_whose_other_owner_is_lost_stays_masked_too() -> None:
    opened = ward_of({"ash": "ab", "birch": "ab", "cedar": "b"}, {"birch": 2}).opened()
    assert opened.closed == ("a",)
    assert opened.rows == {"b": ("ash", "cedar")}


def test_the_owner_may_let_it_be_opened() -> None:
    ward = ward_of({"ash": "ab", "birch": "b", "cedar": "b"}, alone=True)
    opened = ward.opened()
    assert opened.closed == ()
    assert opened.integers.tolist() == ward.plain_sum(opened).tolist()
    assert opened.vector[7:11].any()


def test_shares_of_a_closed_rows_mask_are_given_by_nobody() -> None:
    ward = ward_of({"ash": "ab", "birch": "b", "cedar": "b"})
    ward.opened()
    revealed = [said for _, said in ward.said if isinstance(said, RevealAnswer)]
    assert len(revealed) == 3
    assert all("a" not in said.segments for said in revealed)


def test_rows_of_the_same_owners_are_one_segment_and_those_of_all_go_with_the_trunk() -> None:
    found = list_segments({"ash": "abcd", "birch": "bcd", "cedar": "d"})
    assert [(one.name, one.classes, one.owners) for one in found] == [
        ("", ("d",), ("ash", "birch", "cedar")),
        ("a", ("a",), ("ash",)),
        ("b", ("b", "c"), ("ash", "birch")),
    ]


# ---------------------------------------------------------------------- what a site refuses


@dataclass
class Stages:
    """The requests of a round of three, as an honest coordinator makes them."""

    ward: Ward
    shares: SharesRequest
    masked: MaskedRequest

    @property
    def site(self) -> SiteRound:
        return self.ward.sites["ash"]


TERMS = ParticipationTerms(8.0)


def begun(lines: Mapping[str, SigningIdentity] | None = None, terms: ParticipationTerms = TERMS) -> Stages:
    """Three sites that have stated their keys, and what two have written to the first."""
    names = ("ash", "birch", "cedar")
    identities = lines or {}
    sites = {
        site: SiteRound("run", 3, site, update_of(7, ()), replace(terms, identity=identities.get(site)))
        for site in names
    }
    ward = ward_of(dict.fromkeys(names, ""))
    ward.sites = sites
    said = [sites[site].keys(KeysRequest("run", 3, names, 3)) for site in names]
    shares = SharesRequest(
        "run",
        3,
        tuple(one.statement for one in said),
        tuple(one.signature for one in said),
        tuple(one.identity for one in said),
    )
    letters = {site: sites[site].shares(shares) for site in names[1:]}
    to_ash = tuple(one.letters[one.recipients.index("ash")] for one in letters.values())
    return Stages(ward, shares, MaskedRequest("run", 3, names[1:], to_ash, 7))


def masked_by_ash() -> Stages:
    stages = begun()
    stages.site.shares(stages.shares)
    stages.site.masked(stages.masked)
    return stages


def reveal(*survivors: str) -> RevealRequest:
    return RevealRequest("run", 3, survivors)


def test_of_each_site_one_secret_is_given_and_never_the_other() -> None:
    stages = masked_by_ash()
    given = stages.site.reveal(reveal("ash", "birch"))
    assert set(given.owners) == {"ash", "birch"}
    assert given.gone == ("cedar",)
    for survivors in (("ash", "birch", "cedar"), ("ash", "cedar")):
        with pytest.raises(MaskingRefused, match="has answered another RevealRequest"):
            stages.site.reveal(reveal(*survivors))


def test_the_same_question_gets_the_same_answer() -> None:
    stages = masked_by_ash()
    assert stages.site.masked(stages.masked) is stages.site.masked(stages.masked)
    assert stages.site.reveal(reveal("ash", "birch")) is stages.site.reveal(reveal("ash", "birch"))


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        (("ash",), "1 of 3 sites are left, 2 are needed."),
        (("birch", "cedar"), "not sites that masked"),
        (("ash", "birch", "zebra"), "not sites that masked"),
    ],
)
def test_survivors_that_cannot_be_are_refused(survivors: tuple[str, ...], why: str) -> None:
    with pytest.raises(MaskingRefused, match=why):
        masked_by_ash().site.reveal(reveal(*survivors))


def test_nothing_is_revealed_before_the_update_is_masked() -> None:
    stages = begun()
    stages.site.shares(stages.shares)
    with pytest.raises(MaskingRefused, match="not sites that masked"):
        stages.site.reveal(reveal("ash", "birch"))


def test_an_update_is_masked_for_one_set_of_sites() -> None:
    stages = masked_by_ash()
    with pytest.raises(MaskingRefused, match="has answered another MaskedRequest"):
        stages.site.masked(replace(stages.masked, senders=("birch",), letters=stages.masked.letters[:1]))
    stages.site.reveal(reveal("ash", "birch"))
    with pytest.raises(MaskingRefused, match="let it go"):
        stages.site.masked(stages.masked)


def test_too_few_senders_are_refused() -> None:
    stages = begun()
    stages.site.shares(stages.shares)
    with pytest.raises(MaskingRefused, match="1 of 3 sites are left"):
        stages.site.masked(replace(stages.masked, senders=(), letters=()))


def test_a_letter_from_elsewhere_is_refused() -> None:
    stages = begun()
    stages.site.shares(stages.shares)
    with pytest.raises(ValueError, match="a letter cannot be opened"):
        stages.site.masked(replace(stages.masked, letters=tuple(reversed(stages.masked.letters))))


@pytest.mark.parametrize("kept", [(0,), (1, 2), (0, 1, 1)])
def test_statements_of_one_site_of_others_only_or_twice_are_refused(kept: tuple[int, ...]) -> None:
    stages = begun()
    columns = (stages.shares.statements, stages.shares.signatures, stages.shares.identities)
    relayed = SharesRequest("run", 3, *(tuple(column[place] for place in kept) for column in columns))  # type: ignore[arg-type]
    with pytest.raises(MaskingRefused):
        stages.site.shares(relayed)


def test_a_second_list_of_statements_is_refused() -> None:
    stages = begun()
    stages.site.shares(stages.shares)
    fewer = SharesRequest("run", 3, stages.shares.statements[:2], stages.shares.signatures[:2], ("", ""))
    with pytest.raises(MaskingRefused, match="has answered another SharesRequest"):
        stages.site.shares(fewer)


def test_another_round_is_refused() -> None:
    with pytest.raises(MaskingRefused, match="holds an update of round 3, not of 4"):
        begun().site.keys(KeysRequest("run", 4, ("ash", "birch"), 2))


# ---------------------------------------------------------------------- who is who


def identity() -> SigningIdentity:
    key = ec.generate_private_key(ec.SECP256R1())
    return SigningIdentity(key, public_key_line(key, ""))


def test_statements_are_signed_with_the_admitted_key_and_a_changed_one_is_refused() -> None:
    stages = begun({site: identity() for site in ("ash", "birch", "cedar")})
    changed = stages.shares.statements[1].replace(b'"birch"', b'"maple"')
    relayed = replace(stages.shares, statements=(stages.shares.statements[0], changed, stages.shares.statements[2]))
    with pytest.raises(MaskingRefused, match="is not signed by the site's key"):
        stages.site.shares(relayed)
    stages.site.shares(stages.shares)


def test_a_site_that_knows_its_peers_takes_no_key_that_the_coordinator_made() -> None:
    real = {site: identity() for site in ("ash", "birch", "cedar")}
    known = {site: f"{one.line} {site}@hospital" for site, one in real.items()}
    honest = begun(real, ParticipationTerms(8.0, peers=known))
    honest.site.shares(honest.shares)
    made = {**real, "cedar": identity()}
    with pytest.raises(MaskingRefused, match="of cedar is signed with a key that this site's policy does not know"):
        begun(made, ParticipationTerms(8.0, peers=known))


def test_masks_that_do_not_fit_are_told_from_a_sum() -> None:
    ward = ward_of({"ash": "a", "birch": "a", "cedar": "a"})
    honest = ward.sites["birch"].masked

    def other(request: MaskedRequest) -> MaskedAnswer:
        answer = honest(request)
        return replace(answer, vector=np.random.default_rng(5).integers(0, 2**32, len(answer.vector), np.uint32))

    ward.sites["birch"].masked = other  # type: ignore[method-assign]
    with pytest.raises(MaskingFailed, match="the sum is not one of updates"):
        ward.opened()


# ---------------------------------------------------------------------- fixed point


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20, width=32), min_size=1), st.integers(1, 1000))
def test_a_number_comes_back_within_half_a_step_and_one_beyond_the_range_at_its_end(
    numbers: list[float], divisor: int
) -> None:
    update = np.array(numbers, np.float32)
    back = convert_from_fixed_point(convert_to_fixed_point(update, divisor, 8.0), 8.0)
    wanted = np.clip(update.astype(np.float64), -8, 8) / divisor
    assert np.abs(back - wanted).max() <= 8.0 / ONE / 2 * (1 + 1e-6)
    assert count_out_of_range(update, 8.0) == sum(abs(number) > 8 for number in numbers)


def test_fixed_point_by_hand() -> None:
    # r = 8, two sites: one step is 8 / 2**30; 1.5 * 0.5 = 0.75 = 0.75 / 8 * 2**30 = 100663296 steps.
    found = convert_to_fixed_point(np.array([1.5, -1.5, 100.0], np.float32), 2, 8.0)
    assert found.view(np.int32).tolist() == [100663296, -100663296, 2**29]


def test_what_is_not_finite_is_not_masked() -> None:
    with pytest.raises(ValueError, match="not finite"):
        convert_to_fixed_point(np.array([np.nan], np.float32), 1, 8.0)


def test_stages_are_answered_by_their_own_records() -> None:
    ward = ward_of({"ash": "a", "birch": "a"})
    ward.opened()
    assert [type(said) for _, said in ward.said] == 2 * [KeysAnswer] + 2 * [SharesAnswer] + 2 * [MaskedAnswer] + 2 * [
        RevealAnswer
    ]
