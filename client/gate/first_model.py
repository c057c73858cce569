"""The first model of a run: a site builds it itself, and trains from no other.

It follows from the plan: from its seed, or from a weights file that the plan names by its hash. What this does not stop
is in docs/privacy.md: a later model, and a coordinator that calls a first request a later one.
"""

from importlib.metadata import version

import numpy as np

from client.gate.requested_work import RequestedWork
from client.site.site import Site
from common.errors import BadInput
from common.models.network import build
from common.models.state import FrozenPart, read_state
from common.models.zoo.spec import is_external
from common.plugins import PLUGIN
from common.wire.errors import WireError
from common.wire.records import Groups, TrainRequest

ABSOLUTE, RELATIVE = 1e-6, 1e-5
"""By so much two honest machines may differ in a number. The normal numbers that torch draws from one seed differ in
their last bits between kinds of CPU: by 9e-7 at most with and without AVX2, in 13 networks."""


def begins_with_it(asked: RequestedWork) -> bool:
    """Whether a request to train must hold the first model: in round 1, and where sites are ranked before.

    A model that is passed on comes from the site before.
    """
    return asked.round == 0 or (asked.round == 1 and not asked.method.sequential)


def first_model_fault(site: Site, asked: RequestedWork, request: TrainRequest) -> str:
    """Say why a model is not the first one of its plan, or return an empty string.

    Where the plan names a weights file that is not in the site's ``weights/``, nobody here can know; a line says so.
    """
    plan, source = asked.plan, "seed"
    spec = plan.model
    if plan.weights_sha256 is not None:
        path = site.frozen_parts.weights_file(spec, plan.weights_sha256)
        if path is None:
            file = f"the weights file with SHA-256 {plan.weights_sha256}"
            site.tell(f"the first model of this run is taken as it came: it begins with {file}, not in weights/ here")
            return ""
        spec, source = spec.model_copy(update={"weights": str(path)}), "weights file"
    try:
        network = build(spec, request.class_names, plan.run.seed)
        received = request.model.named()
        own = Groups.of_model(read_state(network)).named()
        if spec.frozen_sha256 is not None:
            sent = request.frozen.trunk
            received["frozen"] = site.frozen_parts.read(spec.frozen_sha256).values if sent is None else sent
            own["frozen"] = FrozenPart.of(network).values
    except BadInput as bad:
        return f"it cannot be built here: {bad.faults[0]}".removesuffix(".")
    except WireError:
        return ""  # the frozen part is not here: the handler asks for it
    if {name: array.shape for name, array in received.items()} != {name: array.shape for name, array in own.items()}:
        return ""  # of another network: the handler says which part does not fit
    alike = [np.isclose(received[name], array, rtol=RELATIVE, atol=ABSOLUTE).ravel() for name, array in own.items()]
    wrong = ~np.concatenate(alike)
    if not wrong.any():
        return ""
    libraries = ["torch", "torchvision"]
    if is_external(spec.architecture) and not spec.architecture.startswith(PLUGIN):
        libraries.append(spec.architecture.partition(":")[0])
    here = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(libraries))
    return (
        f"{wrong.sum():,} of {wrong.size:,} numbers of the model are not those that this site builds from the plan's "
        f"{source}. Compare versions: here {here}. If the coordinator has the same, its program is not the published "
        "one, and this site must not take part"
    )
