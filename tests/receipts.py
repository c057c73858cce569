"""Receipts of small runs, with replies that are really signed, for tests that forge them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.common.security.signatures import REPLY_PREFIX, SIGNATURE_ALGORITHM, ReplyStatement

RUN = "0123456789abcdef"


def message_of(site: str, number: int) -> str:
    """The name of the message that a site's reply answers."""
    return hashlib.sha256(f"{site} {number}".encode()).hexdigest()


def signed_reply(
    key: ec.EllipticCurvePrivateKey, site: str, record: str, server_round: int, number: int, sha256: str
) -> dict[str, Any]:
    """An entry of a receipt."""
    statement = ReplyStatement(
        site=site,
        run=RUN,
        round=server_round,
        record=record,
        message=message_of(site, number),
        sha256=sha256,
        number=number,
        before=message_of(site, number - 1) if number > 1 else "",
    ).model_dump_json()
    signature = key.sign(REPLY_PREFIX + statement.encode(), SIGNATURE_ALGORITHM).hex()
    about = {"site": site, "record": record, "round": server_round, "sha256": sha256, "counts": True, "reason": ""}
    return {**about, "statement": statement, "signature": signature}


def the_receipt(keys: Mapping[str, str], replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A receipt of these sites, by name and public key, and these replies; training replies make the rounds."""
    answers = {reply["site"]: reply["sha256"] for reply in replies if reply["record"] == "RollCallAnswer"}
    rounds: dict[int, dict[str, str]] = {}
    for reply in replies:
        if reply["record"] == "TrainReply":
            rounds.setdefault(reply["round"], {})[reply["site"]] = reply["sha256"]
    receipt = {
        "format_version": 2,
        "run": RUN,
        "sites": {
            site: {"answer_sha256": answers.get(site, ""), "joined": 0, "public_key": key} for site, key in keys.items()
        },
        "rounds": [{"round": number, "sites": rounds[number]} for number in sorted(rounds)],
        "replies": replies,
        "absences": [],
        "resumed": 0,
    }
    return dict(json.loads(json.dumps(receipt)))
