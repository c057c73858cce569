"""The global model as Flower carries it: in our groups, or as a network's ``state_dict``."""

from flwr.app import Array, ArrayRecord

from common.config import Plan
from common.errors import BadInput, Fault, quoted
from common.models.network import build
from common.models.state import Head, ModelState, read_state, write_state
from common.wire.records import Groups


def array_record(model: ModelState) -> ArrayRecord:
    """The global model as Flower's loop carries it."""
    return ArrayRecord({name: Array(array) for name, array in Groups.of_model(model).named().items()})


def model_of(arrays: ArrayRecord, class_names: tuple[str, ...], plan: Plan) -> ModelState:
    """The global model from :func:`array_record`, or from a network's ``state_dict``.

    Raises:
        BadInput: If a ``state_dict`` is not of the plan's network with a head row for each class.
    """
    if is_state_dict(arrays):
        return _of_network(arrays, class_names, plan)
    head = Head(class_names, arrays["head.weight"].numpy(), arrays["head.bias"].numpy())
    return ModelState(arrays["trunk"].numpy(), arrays["norm"].numpy(), head)


def is_state_dict(arrays: ArrayRecord) -> bool:
    """Whether these are the tensors of a network, as Flower's examples have them."""
    return "trunk" not in arrays


def state_dict_record(model: ModelState, plan: Plan) -> ArrayRecord:
    """The global model as the ``state_dict`` of the plan's network."""
    network = build(plan.model, model.head.class_names, plan.run.seed)
    write_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    return ArrayRecord(network.state_dict())


def _of_network(arrays: ArrayRecord, class_names: tuple[str, ...], plan: Plan) -> ModelState:
    network = build(plan.model, class_names, plan.run.seed)
    try:
        network.load_state_dict(arrays.to_torch_state_dict())
    except RuntimeError as error:
        problem = f"is no state_dict of the plan's network with the classes {quoted(class_names)}: {error}"
        raise BadInput([Fault("initial_arrays", problem)]) from None
    return read_state(network)
