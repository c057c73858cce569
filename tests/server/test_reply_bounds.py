"""How much a reply may weigh."""

from common.wire.codec import encode
from common.wire.secure_aggregation import MaskedRequest, RevealRequest
from server.deployment.superlink.objects.reply_bounds import MORE_BYTES, MORE_OBJECTS, Bound, asked_for


def test_a_masked_update_may_be_as_long_as_its_request_says() -> None:
    numbers = 11_000_000
    request = encode(MaskedRequest("run", 1, ("south",), (b"letter",), numbers))
    assert asked_for(request) == 4 * numbers
    bound = Bound.on_reply_to([100, 100], 150, asked_for(request))
    # 44 MB in chunks of 4 MiB are eleven.
    assert bound == Bound(2 + 11 + MORE_OBJECTS, 200 + 4 * numbers + MORE_BYTES, 150 + 4 * numbers + MORE_BYTES)
    assert not bound.fault(8, 4 * numbers + 1000)
    assert "weighs more" in bound.fault(8, 4 * numbers + 2 * MORE_BYTES)


def test_other_requests_ask_for_no_more_than_they_hold() -> None:
    assert asked_for(encode(RevealRequest("run", 1, ("north",)))) == 0


def test_a_reply_as_large_as_its_request_fits_with_room_for_figures() -> None:
    bound = Bound.on_reply_to([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(3, 44_000_103) == ""
    assert bound.fault(3 + MORE_OBJECTS, 44_000_103 + MORE_BYTES) == ""


def test_a_reply_of_more_parts_or_more_bytes_is_refused_with_the_figures() -> None:
    bound = Bound.on_reply_to([100, 44_000_000, 3], 44_000_000)
    assert bound.fault(16, 10) == "its reply has 16 parts; what was asked for has at most 15"
    said = "its reply weighs more than 61 MB, the most that what was asked for can weigh"
    assert bound.fault(3, 44_000_104 + MORE_BYTES) == said
