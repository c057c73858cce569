"""The stages of a masked round, and a site that answers one."""

from common.wire.records import Record
from common.wire.secure_aggregation import KeysRequest, MaskedRequest, RevealRequest, SharesRequest
from strategies.privacy.secure_aggregation.site import SiteMaskingRound

STAGES = (KeysRequest, SharesRequest, MaskedRequest, RevealRequest)


def answer_request(site: SiteMaskingRound, request: Record) -> Record:
    answers = (
        site.answer_with_keys,
        site.answer_with_shares,
        site.answer_with_masked_update,
        site.answer_with_revealed_shares,
    )
    return answers[STAGES.index(type(request))](request)
