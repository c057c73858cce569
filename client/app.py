"""The ClientApp: what a coordinator may ask or tell, answered by typed records."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.benefit.compare import compare
from client.gate.gate import gate
from client.roll_call import answer
from client.site.site import Site
from client.training.private_round import private_evaluation, private_round
from client.training.secure_aggregation import Masks
from common.wire.benefit import BenefitRequest
from common.wire.codec import decode, encode
from common.wire.records import EvaluateRequest, TrainReply, TrainRequest
from common.wire.roll_call import Refusal, RefusalNoted, RollCall
from common.wire.secure_aggregation import STAGES, KeysRequest, MaskedRequest, RevealRequest, SharesRequest

SiteOf = Callable[[Context], Site]


def client_app(
    site_of: SiteOf,
    on_refusal: Callable[[Refusal], None] = lambda refusal: None,
    tell: Callable[[str], None] = lambda text: None,
) -> ClientApp:
    """Build the app of a process that serves one site, or, in simulation, the site that is asked for.

    Args:
        site_of: Finds the site that a message is for.
        on_refusal: Called when the coordinator does not take the site.
        tell: Called with what a site's people should know, in words.
    """
    app, masks = ClientApp(mods=[gate(site_of)]), Masks(tell)

    def answered(kind: type[Any], work: Callable[[Site, Any], Any]) -> Callable[[Message, Context], Message]:
        """A handler: decode the one record that is expected, do the work, encode its result."""
        return lambda message, context: Message(
            encode(work(site_of(context), decode(message.content, kind))), reply_to=message
        )

    def train(site: Site, request: TrainRequest) -> TrainReply:
        masks.let_go(site)
        return masks.held_back(site, request, private_round(site, request))

    def note_refusal(site: Site, refusal: Refusal) -> RefusalNoted:
        on_refusal(refusal)
        return RefusalNoted(refusal.run, site.name)

    app.query("roll_call")(answered(RollCall, answer))
    app.query("refusal")(answered(Refusal, note_refusal))
    app.train()(answered(TrainRequest, train))
    app.evaluate()(answered(EvaluateRequest, partial(private_evaluation, hold=masks.hold_histograms)))
    app.query("benefit")(answered(BenefitRequest, compare))
    app.query(STAGES[KeysRequest])(answered(KeysRequest, masks.keys))
    app.query(STAGES[SharesRequest])(answered(SharesRequest, masks.shares))
    app.query(STAGES[MaskedRequest])(answered(MaskedRequest, masks.masked))
    app.query(STAGES[RevealRequest])(answered(RevealRequest, masks.reveal))
    return app
