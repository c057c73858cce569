"""Ask the sites, after the test, whether they are better off alone: one more exchange, which the run can do without.

It is apart from the test, so that a site that fails in it, or takes too long, has been tested all the same.
"""

from collections.abc import Mapping
from functools import partial

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.models.state import ModelState
from common.system.timers import ALONE_TIMES
from common.wire.codec import encode
from common.wire.records import BenefitReply, BenefitRequest, Groups
from strategies.base.state import groups_for
from strategies.rounds.messages.replies import Replies
from strategies.rounds.messages.requests import Requests
from strategies.rounds.strategy import FederatedAveraging

QUERY = f"{MessageType.QUERY}.benefit"


def deadline_s(round_deadline_s: float, rounds_took_s: float, drawn: float) -> float:
    """How long the sites have for it: :data:`ALONE_TIMES` times what all rounds took, and a round's deadline beside.

    Args:
        rounds_took_s: By the coordinator's clock, from the sending of each round's requests to its end.
        drawn: Of the sites the share that took part in a round: in a simulation all of them are at work now.
    """
    return round_deadline_s + ALONE_TIMES * rounds_took_s / drawn


def compared(
    strategy: FederatedAveraging, grid: Grid, initial: ModelState, epochs: Mapping[str, int], seconds: float
) -> Replies[BenefitReply]:
    """Have sites compare the model that the run ends with with one that each trains alone.

    Args:
        initial: The model that the run began with.
        epochs: Site -> local epochs that it trained in the run; the sites that are asked.
        seconds: Until nobody waits for a reply.
    """
    requests = strategy.new_requests(strategy.state.round)
    requests.deadline_s = seconds
    messages = [_message(requests, site, strategy.result, initial, count) for site, count in sorted(epochs.items())]
    replies = strategy.exchanged(grid, messages, "benefit", strategy.state.round, seconds)
    return strategy.received(replies, BenefitReply)


def _message(requests: Requests, site: str, model: ModelState, initial: ModelState, epochs: int) -> Message:
    own = groups_for(initial, requests.known.contract.sites[site])
    request = requests.request(partial(BenefitRequest, initial=own, epochs=epochs), site, model)
    requests.expected[site] = Groups()
    return requests.message(site, QUERY, encode(request, requests.written))
