"""Send the packages of a run over the connections of the hospitals: ``flwr-server deliver --send``."""

from collections.abc import Mapping

from polyclinic.common.security.delivery import DELIVERY_RUN, Delivery, pack_delivery
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.delivery import DeliveryRequest, make_delivery_request
from polyclinic.common.wire.fleet_protocol import DELIVERY_TYPE
from polyclinic.common.wire.records import RefusalNoted
from polyclinic.common.wire.versions import WIRE_VERSION, is_record_in_version
from polyclinic.server.questions.exchange import OLD_RELEASE, QuestionExchange, make_question_run
from polyclinic.strategies.engine.exchange import NOT_CONNECTED_REASON


def send_packages(exchange: QuestionExchange, deliveries: Mapping[str, Delivery]) -> dict[str, str]:
    """Send each connected hospital its package.

    Returns:
        Site -> reason why it has not stored its package; empty if it has.
    """
    assert exchange.registered is not None, "packages go to hospitals only"
    names = {node: name for node, name in exchange.registered().items() if name in deliveries}
    versions = exchange.versions() if exchange.versions else {}
    outcome = dict.fromkeys(deliveries, NOT_CONNECTED_REASON)
    connected = set(exchange.grid.get_node_ids())
    run = make_question_run(DELIVERY_RUN)
    contents = {}
    for node in sorted(names.keys() & connected):
        site = names[node]
        if not is_record_in_version(DeliveryRequest.__name__, versions.get(node, WIRE_VERSION)):
            outcome[site] = OLD_RELEASE
            continue
        outcome[site] = f"no answer within {exchange.deadline_s:.0f} s"  # until an answer arrives
        contents[node] = encode_record(make_delivery_request(run, pack_delivery(deliveries[site])))
    for node, answer, reason in exchange.exchange_records(contents, DELIVERY_TYPE, RefusalNoted):
        site = names[node]
        if answer is not None and (answer.run, answer.site) != (run, site):
            reason = "its answer is to something else"
        outcome[site] = reason
    return outcome
