"""From a receipt alone: a forged, a swapped, a replayed and a withheld reply are found, and nothing else is.

Anyone who changes the receipt here may write anything into it and has every key but the victim's.
"""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.common.security.authorship import SentReply, SiteReplyRecord, check_receipt_authorship
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.common.security.signatures import REPLY_PREFIX, SIGNATURE_ALGORITHM
from tests.receipts import message_of, signed_reply, the_receipt

KEYS = {site: ec.generate_private_key(ec.SECP256R1()) for site in ("east", "north")}
LINES = {site: format_public_key_line(key, "") for site, key in KEYS.items()}
TRUSTED = {site: (line,) for site, line in LINES.items()}
FORGER = ec.generate_private_key(ec.SECP256R1())
SCHEDULE = [("RollCallAnswer", 0), ("TrainReply", 1), ("TrainReply", 2), ("TrainReply", 3), ("EvaluateReply", 3)]
RunReceipt = dict[str, Any]
ABSENCE = {"site": "north", "where": "round 2", "reason": "no reply within 60 s"}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def receipt() -> RunReceipt:
    replies = [
        signed_reply(key, site, record, server_round, number, sha(f"{site} {record} {server_round}"))
        for number, (record, server_round) in enumerate(SCHEDULE, 1)
        for site, key in KEYS.items()
    ]
    return the_receipt(LINES, replies)


def reply(receipt: RunReceipt, site: str, record: str, server_round: int) -> dict[str, Any]:
    key = {"site": site, "record": record, "round": server_round}
    (entry,) = [entry for entry in receipt["replies"] if key.items() <= entry.items()]
    return dict(entry)


def norths_second(receipt: RunReceipt) -> dict[str, Any]:
    return reply(receipt, "north", "TrainReply", 2)


def replace(receipt: RunReceipt, old: dict[str, Any], new: dict[str, Any] | None) -> None:
    """Put one reply in the place of another, also in what the round was made of."""
    place = receipt["replies"].index(old)
    receipt["replies"][place : place + 1] = [new] if new else []
    for line in receipt["rounds"]:
        if line["round"] == old["round"] and line["sites"].get(old["site"]) == old["sha256"]:
            line["sites"].pop(old["site"])
            if new:
                line["sites"][old["site"]] = new["sha256"]


def problems(receipt: RunReceipt, keys: dict[str, tuple[str, ...]] | None = None) -> str:
    return " ".join(map(str, check_receipt_authorship(receipt, keys or {}).faults))


def test_a_receipt_whose_sites_signed_everything_is_right(receipt: RunReceipt) -> None:
    verdict = check_receipt_authorship(receipt, TRUSTED)
    assert (verdict.faults, verdict.notes) == ([], [])
    assert verdict.right == ["signatures: 10 replies, each signed by its site"]


def poison(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    return signed_reply(key, "north", "TrainReply", 2, 3, sha("poison"))


def no_statement(old: dict[str, Any]) -> dict[str, Any]:
    signature = KEYS["north"].sign(REPLY_PREFIX + b"polyclinic", SIGNATURE_ALGORITHM).hex()
    return {**old, "statement": "polyclinic", "signature": signature}


def of_another_kind(receipt: RunReceipt) -> None:
    old, other = reply(receipt, "north", "TrainReply", 3), reply(receipt, "north", "EvaluateReply", 3)
    replace(receipt, old, {**other, "record": "TrainReply"})


def rounds_of_other_replies(receipt: RunReceipt) -> None:
    first, second = receipt["rounds"][0]["sites"], receipt["rounds"][1]["sites"]
    first["north"], second["north"] = second["north"], first["north"]


def withheld(receipt: RunReceipt) -> None:
    replace(receipt, norths_second(receipt), None)


def withheld_twice_with_one_excuse(receipt: RunReceipt) -> None:
    replace(receipt, reply(receipt, "north", "TrainReply", 1), None)
    withheld(receipt)
    receipt["absences"] = [ABSENCE]


def all_withheld(receipt: RunReceipt) -> None:
    receipt["replies"] = [entry for entry in receipt["replies"] if entry["site"] != "north"]
    for line in receipt["rounds"]:
        del line["sites"]["north"]


def swapped(change: Callable[[RunReceipt, dict[str, Any]], dict[str, Any]]) -> Callable[[RunReceipt], None]:
    """Put what this makes of north's second reply in its place."""

    def done(receipt: RunReceipt) -> None:
        old = norths_second(receipt)
        replace(receipt, old, change(receipt, old))

    return done


def sent_too(entry: Callable[[RunReceipt], dict[str, Any]]) -> Callable[[RunReceipt], None]:
    return lambda receipt: receipt["replies"].append(entry(receipt))


UNSIGNED = "its answer to the roll call is not among the replies that it signed"
NOT_BY_KEY = "not by the key of the one in whose name it came"
SOUTHS = signed_reply(FORGER, "south", "TrainReply", 2, 1, sha("poison"))
CHANGES: dict[str, tuple[Callable[[RunReceipt], Any], str]] = {
    "by another key": (swapped(lambda receipt, old: poison(FORGER)), NOT_BY_KEY),
    "by another site's key": (swapped(lambda receipt, old: poison(KEYS["east"])), NOT_BY_KEY),
    "unsigned": (
        swapped(lambda receipt, old: {**old, "sha256": sha("x"), "statement": "", "signature": ""}),
        "not signed",
    ),
    "other content": (swapped(lambda receipt, old: {**old, "sha256": sha("poison")}), "swapped"),
    "of another round": (
        swapped(lambda receipt, old: {**reply(receipt, "north", "TrainReply", 1), "round": 2}),
        "swapped",
    ),
    "of another site": (
        swapped(lambda receipt, old: {**reply(receipt, "east", "TrainReply", 2), "site": "north"}),
        "this site",
    ),
    "no statement": (swapped(lambda receipt, old: no_statement(old)), "its statement cannot be read"),
    "of another kind": (of_another_kind, "swapped"),
    "of another run": (lambda receipt: receipt.update(run="fedcba9876543210"), "swapped"),
    "rounds of other replies": (rounds_of_other_replies, "no reply of that round: swapped"),
    "blamed": (
        lambda receipt: receipt["rounds"][1].update(left_out={"north": "far from the others'"}),
        "round 2 counts north and leaves it out",
    ),
    "repeated": (sent_too(norths_second), "twice, as TrainReply of round 2: replayed"),
    "withheld": (withheld, "1 reply of north (number 3"),
    "withheld twice with one excuse": (withheld_twice_with_one_excuse, "2 replies of north (number 2, 3"),
    "withheld, and another site's absence": (
        lambda receipt: (withheld(receipt), receipt.update(absences=[{**ABSENCE, "site": "east"}])),
        "withheld",
    ),
    "a stranger": (sent_too(lambda receipt: SOUTHS), "names south, which does not take part: forged"),
    "no key": (lambda receipt: receipt["sites"]["north"].update(public_key=""), "own public key"),
    "an unsigned answer": (lambda receipt: receipt["sites"]["north"].update(answer_sha256=sha("x")), UNSIGNED),
    "all withheld": (all_withheld, UNSIGNED),
    "a key under two names": (
        lambda receipt: receipt["sites"].update(
            ghost={**receipt["sites"]["north"], "public_key": LINES["north"] + " o"}
        ),
        "north and ghost have the same public key: forged.",
    ),
    "a round that counts a ghost": (
        lambda receipt: receipt["rounds"][1]["sites"].update(ghost=sha("x")),
        "round 2 counts ghost, which does not take part: forged.",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_receipt_is_found_out(name: str, receipt: RunReceipt) -> None:
    change, problem = CHANGES[name]
    before = copy.deepcopy(receipt)
    change(receipt)
    assert receipt != before
    assert problem in problems(receipt)
    assert "east:" not in problems(receipt) or name == "of another run"


def test_whoever_makes_new_keys_for_all_sites_is_found_out_by_one_key_that_is_known(receipt: RunReceipt) -> None:
    keys = {site: ec.generate_private_key(ec.SECP256R1()) for site in KEYS}
    replies = [
        signed_reply(keys[old["site"]], old["site"], old["record"], old["round"], number // 2 + 1, old["sha256"])
        for number, old in enumerate(receipt["replies"])
    ]
    forged = the_receipt({site: format_public_key_line(key, "") for site, key in keys.items()}, replies)
    assert problems(forged) == ""
    assert "north: the receipt does not name this site's own public key: forged." in problems(forged, TRUSTED)


@pytest.mark.parametrize(
    "excuse", [{"absences": [ABSENCE]}, {"absences": [{**ABSENCE, "where": "round 7"}] * 5}, {"resumed": 1}]
)
def test_the_coordinators_own_word_excuses_no_reply_that_it_took(excuse: dict[str, Any], receipt: RunReceipt) -> None:
    """It writes absences and resumptions itself, without anybody's signature."""
    withheld(receipt)
    receipt |= excuse
    (fault,) = check_receipt_authorship(receipt, TRUSTED).faults
    assert fault.site == "north"
    assert "TrainReply of round 2" in fault.problem
    assert check_receipt_authorship(receipt, TRUSTED).notes == []


def test_a_withheld_reply_is_named_by_its_neighbours_and_by_the_round_that_lacks_it(receipt: RunReceipt) -> None:
    withheld(receipt)
    replace(receipt, reply(receipt, "east", "RollCallAnswer", 0), None)
    faults = {fault.site: fault.problem for fault in check_receipt_authorship(receipt, TRUSTED).faults if fault.site}
    assert "between its TrainReply of round 1 and its TrainReply of round 3" in faults["north"]
    assert "no TrainReply of round 2" in faults["north"]
    assert "before its TrainReply of round 1" in faults["east"]


def test_a_site_names_what_it_sent_last(receipt: RunReceipt) -> None:
    replace(receipt, reply(receipt, "north", "EvaluateReply", 3), None)
    sent = [SentReply(record, 3, sha(f"north {record} 3")) for record in ("TrainReply", "EvaluateReply")]
    assert check_receipt_authorship(receipt, TRUSTED).faults == []
    (fault,) = check_receipt_authorship(receipt, TRUSTED, SiteReplyRecord("north", 5, sent)).faults
    assert "after its TrainReply of round 3" in fault.problem
    assert "EvaluateReply of round 3" in fault.problem
    assert check_receipt_authorship(receipt, TRUSTED, SiteReplyRecord("east", 5)).faults == []


def test_a_reply_that_was_sent_anew_after_a_kill_under_the_same_number_is_no_fault(receipt: RunReceipt) -> None:
    old = reply(receipt, "north", "TrainReply", 3)
    again = signed_reply(KEYS["north"], "north", "TrainReply", 3, 3, sha("again"))
    statement = again["statement"].replace(message_of("north", 3), message_of("north", 99))
    signature = KEYS["north"].sign(REPLY_PREFIX + statement.encode(), SIGNATURE_ALGORITHM).hex()
    replace(receipt, old, {**again, "statement": statement, "signature": signature})
    number_five = reply(receipt, "north", "EvaluateReply", 3)
    replace(receipt, number_five, signed_reply(KEYS["north"], "north", "EvaluateReply", 3, 4, number_five["sha256"]))
    assert problems(receipt) == ""


RENEWED = ec.generate_private_key(ec.SECP256R1())
"""The key that ``north`` has from round 3 on."""
NORTHS_KEYS = (format_public_key_line(RENEWED, ""), LINES["north"])
LATER_REPLIES = (("RollCallAnswer", 0, 4), ("TrainReply", 3, 5), ("EvaluateReply", 3, 6))
"""Kind, round and number of what ``north`` signs after the renewal."""


@pytest.fixture
def renewed(receipt: RunReceipt) -> RunReceipt:
    """The receipt of a run in which a site renewed its key before round 3, and answered the roll call again."""
    kept = [old for old in receipt["replies"] if old["site"] == "east" or (old["round"] < 3)]
    later = [
        signed_reply(RENEWED, "north", record, server_round, number, sha(f"north {record} {server_round} again"))
        for record, server_round, number in LATER_REPLIES
    ]
    receipt = the_receipt({"east": LINES["east"], "north": NORTHS_KEYS[0]}, [*kept, *later])
    receipt["sites"]["north"]["old_public_keys"] = [LINES["north"]]
    return receipt


def test_a_reply_that_was_signed_before_a_renewal_in_the_run_is_checked_by_the_key_of_that_time(
    renewed: RunReceipt,
) -> None:
    assert problems(renewed) == ""
    assert problems(renewed, {"north": NORTHS_KEYS}) == ""
    del renewed["sites"]["north"]["old_public_keys"]
    assert "north: the TrainReply of round 2" in problems(renewed)


def test_an_old_key_in_a_receipt_must_be_one_of_the_sites_own(renewed: RunReceipt) -> None:
    """Else a coordinator that makes up a key signs replies of early rounds in the site's name."""
    forged = signed_reply(FORGER, "north", "TrainReply", 2, 3, sha("poison"))
    replace(renewed, norths_second(renewed), forged)
    renewed["sites"]["north"]["old_public_keys"] = [LINES["north"], format_public_key_line(FORGER, "")]
    assert "had earlier in the run" in problems(renewed, {"north": NORTHS_KEYS})
    assert "had earlier in the run" in problems(renewed, {"north": NORTHS_KEYS[:1]})


def test_a_revoked_key_signs_nothing_after_the_renewal(renewed: RunReceipt) -> None:
    """Keys are revoked because somebody else may have them."""
    third = reply(renewed, "north", "TrainReply", 3)
    replace(renewed, third, signed_reply(KEYS["north"], "north", "TrainReply", 3, 5, sha("stolen")))
    assert "north: the TrainReply of round 3" in problems(renewed, {"north": NORTHS_KEYS})


@pytest.mark.parametrize("keys", [[""], ["x"], "abc", [LINES["east"]]])
def test_old_keys_that_are_none_are_faults(keys: Any, renewed: RunReceipt) -> None:
    renewed["sites"]["north"]["old_public_keys"] = keys
    assert problems(renewed) != ""
    assert problems(renewed, {"north": NORTHS_KEYS}) != ""


def test_a_simulation_has_no_signatures_and_says_so(receipt: RunReceipt) -> None:
    receipt["replies"] = []
    for site in receipt["sites"].values():
        site["public_key"] = ""
    verdict = check_receipt_authorship(receipt, {})
    assert verdict.faults == []
    assert "signatures: none, as in every simulation" in verdict.notes[0]


def test_signatures_cannot_be_taken_out_of_a_hospitals_receipt(receipt: RunReceipt) -> None:
    receipt["replies"] = []
    assert "no reply of that round: swapped" in problems(receipt)
    for site in receipt["sites"].values():
        site["public_key"] = ""
    assert "forged" in problems(receipt, TRUSTED)


@pytest.mark.parametrize("count", [-1, 1e308, float("nan"), "9", None, True])
def test_a_count_of_resumptions_that_is_none_is_refused(count: Any, receipt: RunReceipt) -> None:
    receipt["resumed"] = count
    with pytest.raises(ValueError, match="resumed is no count"):
        check_receipt_authorship(receipt, TRUSTED)


def test_a_reason_is_cut(receipt: RunReceipt) -> None:
    withheld(receipt)
    receipt["absences"].append({**ABSENCE, "reason": "A" * 3000})
    (fault,) = check_receipt_authorship(receipt, TRUSTED).faults
    assert len(str(fault)) < 700
