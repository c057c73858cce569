"""A hospital whose program says what no honest one can: hostile words and figures in its replies.

Round 1 fails with an error text as long as the coordinator's door lets through; each round after it says one more
thing, and its answers to the test are better than can be. ``python -m tests.network.loose_talker start FOLDER``.
"""

import sys
from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message

import polyclinic.client.cli
from polyclinic.client.connection.service import HospitalMessageLoop
from polyclinic.server.deployment.superlink.fleet_service import MAX_ENVELOPE_BYTES
from tests import harms
from tests.words import FORGED

LONG = ("\x1b[2J\u202e<script>alert(1)</script>" * 1_000)[: MAX_ENVELOPE_BYTES // 2]
"""Longer ones never get in: a reply whose words are above ``MAX_ENVELOPE_BYTES`` is refused as it comes."""
WORDS = "\x1b]0;PWNED\x07\x1b[31m\x9b2J\u202egnp.exe" + FORGED
Spoil = Callable[[Message, Message], Message]
"""Makes of what was asked, and the honest reply, the reply that leaves."""


def error(text: str) -> Spoil:
    """Fail with this text."""
    return lambda request, reply: Message(Error(999, text), reply_to=request)


def says(**fields: object) -> Spoil:
    """Say something else in small fields."""

    def spoil(request: Message, reply: Message) -> Message:
        harms.says(**fields)(reply.content)
        return reply

    return spoil


TRAINING: tuple[tuple[Spoil, str], ...] = (
    (error(LONG), "characters cut)"),
    (error(WORDS), r"\x1b]0;PWNED\x07\x1b[31m\x9b2J\u202egnp.exe\n12:00:00  round 9 of 9"),
    (says(validation_loss=-1e300), "TrainReply.validation_loss must be from 0 to 1e+06, not -1e+300"),
    (says(train_loss=1e300), "TrainReply.train_loss must be from -1e+06 to 1e+06, not 1e+300"),
    (says(validation_auroc=55.0), "TrainReply.validation_auroc must be from 0 to 1, not 55"),
    (says(seconds=-1e12), "TrainReply.seconds must be from 0 to 1e+08, not -1e+12"),
    (says(seconds=1e6), "says that it trained for 1,000,000 s, and was asked at most"),
    (says(epochs=-(2**40)), "TrainReply.epochs must be from 0 to 1,000,000, not -1,099,511,627,776"),
    (says(epochs=77), "says that it trained 77 epochs, and was asked for at most 1"),
    (says(epsilon=-1.0), "TrainReply.epsilon must be from 0 to 1e+09, not -1"),
    (says(site=WORDS), r"TrainReply.site must be one line of at most 200 printable characters"),
    (says(**{WORDS: 1}), r"TrainReply does not have \x1b]0;PWNED"),
    (says(update__classes=[WORDS]), r"class names of update"),
)
"""By round, from 1: what is said, and words of the reason."""
TEST: tuple[Spoil, str] = (says(auroc=[77.0] * 4), "EvaluateReply.auroc entry 1: must be from 0 to 1, not 77")

Replied = Callable[[HospitalMessageLoop, Message], Message]


def loose(replied: Replied) -> Replied:
    """Change each reply to training and to the test before it is sent."""

    def changed(service: HospitalMessageLoop, request: Message) -> Message:
        kind, reply = request.metadata.message_type, replied(service, request)
        if not reply.has_content() or kind not in ("train", "evaluate"):
            return reply
        fields = reply.content["fields"]
        if kind == "train":
            return TRAINING[int(fields["round"]) - 1][0](request, reply)
        return TEST[0](request, reply) if fields["class_names"] else reply

    return changed


def main() -> None:
    """``flwr-client`` with another way to reply."""
    replied: Any = HospitalMessageLoop._make_reply
    HospitalMessageLoop._make_reply = loose(replied)  # type: ignore[method-assign]
    polyclinic.client.cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
