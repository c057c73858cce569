"""How much a reply may weigh."""

from common.wire.codec import encode
from common.wire.secure_aggregation import MaskedRequest, RevealRequest
from server.deployment.superlink.object_store import SPARE_BYTES, SPARE_OBJECTS, ReplyBound, masked_update_bytes


def test_a_masked_update_may_be_as_long_as_its_request_says() -> None:
    numbers = 11_000_000
    request = encode(MaskedRequest("run", 1, ("south",), (b"letter",), numbers))
    assert masked_update_bytes(request) == 4 * numbers
    bound = ReplyBound.for_request([100, 100], 150, masked_update_bytes(request))
    # 44 MB in chunks of 4 MiB are eleven.
    assert bound == ReplyBound(2 + 11 + SPARE_OBJECTS, 200 + 4 * numbers + SPARE_BYTES, 150 + 4 * numbers + SPARE_BYTES)
    assert not bound.fault(8, 4 * numbers + 1000)
    assert "weighs more" in bound.fault(8, 4 * numbers + 2 * SPARE_BYTES)


def test_other_requests_ask_for_no_more_than_they_hold() -> None:
    assert masked_update_bytes(encode(RevealRequest("run", 1, ("north",)))) == 0


def test_a_reply_as_large_as_its_request_fits_with_room_for_figures() -> None:
    bound = ReplyBound.for_request([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(3, 44_000_103) == ""
    assert bound.fault(3 + SPARE_OBJECTS, 44_000_103 + SPARE_BYTES) == ""


def test_a_reply_of_more_parts_or_more_bytes_is_refused_with_the_figures() -> None:
    bound = ReplyBound.for_request([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(16, 10) == "its reply has 16 parts; what was asked for has at most 15"
    said = "its reply weighs more than 61 MB, the most that what was asked for can weigh"
    assert bound.fault(3, 44_000_104 + SPARE_BYTES) == said
