"""The ClientApp: what a coordinator may ask or tell, answered by typed records."""

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.gate.gate import gate
from client.site.disclosure import patients_in, refuse_few, told_count
from client.site.last_plan import remember
from client.site.site import Site
from client.training.network_cache import empty_network
from client.training.private import private_evaluation, private_round, refuse_unaffordable
from client.training.secure_aggregation import Masks
from common import __version__
from common.config import Plan
from common.models.state import layout_of
from common.wire.codec import decode, encode
from common.wire.records import (
    UNKNOWN_COUNT,
    EvaluateRequest,
    Refusal,
    RefusalNoted,
    RollCall,
    RollCallAnswer,
    TrainRequest,
)
from common.wire.secure_aggregation import KeysRequest, MaskedRequest, RevealRequest, SharesRequest
from strategies.registry import method_of
from strategies.rounds.secure_aggregation import STAGES

SiteOf = Callable[[Context], Site]


def client_app(
    site_of: SiteOf,
    on_refusal: Callable[[Refusal], None] = lambda refusal: None,
    tell: Callable[[str], None] = lambda text: None,
) -> ClientApp:
    """Build the app of a process that serves one site, or, in simulation, whichever site is asked for.

    Args:
        site_of: Finds the site that a message is for.
        on_refusal: Told when the coordinator does not take the site.
        tell: Told, in words, what a site's people should know.
    """
    app, masks = ClientApp(mods=[gate(site_of)]), Masks(tell)

    @app.query("roll_call")
    def _(message: Message, context: Context) -> Message:
        return Message(encode(answer(site_of(context), decode(message.content, RollCall))), reply_to=message)

    @app.query("refusal")
    def _(message: Message, context: Context) -> Message:
        refusal = decode(message.content, Refusal)
        on_refusal(refusal)
        return Message(encode(RefusalNoted(refusal.run, site_of(context).name)), reply_to=message)

    @app.train()
    def _(message: Message, context: Context) -> Message:
        site, request = site_of(context), decode(message.content, TrainRequest)
        return Message(encode(masks.held_back(site, request, private_round(site, request))), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        request = decode(message.content, EvaluateRequest)
        return Message(encode(private_evaluation(site_of(context), request)), reply_to=message)

    @app.query(STAGES[KeysRequest])
    def _(message: Message, context: Context) -> Message:
        reply = masks.keys(site_of(context), decode(message.content, KeysRequest))
        return Message(encode(reply), reply_to=message)

    @app.query(STAGES[SharesRequest])
    def _(message: Message, context: Context) -> Message:
        reply = masks.shares(site_of(context), decode(message.content, SharesRequest))
        return Message(encode(reply), reply_to=message)

    @app.query(STAGES[MaskedRequest])
    def _(message: Message, context: Context) -> Message:
        reply = masks.masked(site_of(context), decode(message.content, MaskedRequest))
        return Message(encode(reply), reply_to=message)

    @app.query(STAGES[RevealRequest])
    def _(message: Message, context: Context) -> Message:
        reply = masks.reveal(site_of(context), decode(message.content, RevealRequest))
        return Message(encode(reply), reply_to=message)

    return app


def answer(site: Site, call: RollCall) -> RollCallAnswer:
    """Say who the site is, what it annotates and how many images it has."""
    plan = Plan.model_validate_json(call.plan)
    method = method_of(plan)
    refuse_few(site.train, site.policy)
    refuse_unaffordable(site, plan, method)
    if site.durable:
        remember(site.folder, call.plan)
    asks = method.traffic.label_counts
    positives, negatives = label_counts(site) if asks and site.policy.label_counts else ((), ())
    layout = layout_of(empty_network(plan.model, site.declaration.canonical, site.device))
    return RollCallAnswer(
        run=call.run,
        site=site.name,
        names=site.declaration.names,
        class_names=site.declaration.canonical,
        train_samples=site.train_samples,
        validation_samples=told_count(len(site.validation), site.policy) if site.tells("validation") else UNKNOWN_COUNT,
        patients=told_count(patients_in(site.train), site.policy),
        layout=layout.signature,
        version=__version__,
        positives=positives,
        negatives=negatives,
        smallest_count=site.policy.smallest_count,
    )


def label_counts(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Training images with and without each class, in the site's own order; hidden classes stay unknown."""
    labels, hidden = site.train.labels, site.hides("train")
    positives, negatives = (
        tuple(
            UNKNOWN_COUNT if name in hidden else told_count(count, site.policy)
            for name, count in zip(site.train.class_names, (labels == value).sum(axis=0).tolist(), strict=True)
        )
        for value in (1, 0)
    )
    return positives, negatives
