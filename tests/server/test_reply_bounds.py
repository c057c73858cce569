"""How much a reply may weigh."""

from common.masking_records import MaskedRequest, RevealRequest
from common.wire import encode
from server.reply_bounds import MORE_BYTES, MORE_OBJECTS, Bound, asked_for


def test_a_masked_update_may_be_as_long_as_its_request_says() -> None:
    numbers = 11_000_000
    request = encode(MaskedRequest("run", 1, ("south",), (b"letter",), 2.0, numbers))
    assert asked_for(request) == 4 * numbers
    bound = Bound.on_reply_to([100, 100], asked_for(request))
    # 44 MB in chunks of 16 MiB are three.
    assert bound == Bound(2 + 3 + MORE_OBJECTS, 200 + 4 * numbers + MORE_BYTES)
    assert not bound.fault(8, 4 * numbers + 1000)
    assert "weighs more" in bound.fault(8, 4 * numbers + 2 * MORE_BYTES)


def test_other_requests_ask_for_no_more_than_they_hold() -> None:
    assert asked_for(encode(RevealRequest("run", 1, ("north",)))) == 0
