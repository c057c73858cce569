"""What a request of a round asks of a site: the network with the model in it, and the images."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from client.site.memory import Memory, MemoryFolder
from client.site.site import Site
from client.training.features import NetworkOnFeatures, features_of, trains_on_features
from client.training.network_cache import empty_network, fill_frozen_part
from common.config import Plan, plan_of_text
from common.data.images.pixels import Pixels, at_rows
from common.errors import quoted
from common.models.network import SplitNetwork
from common.models.state import ModelState, write_state
from common.wire.errors import WireError
from common.wire.records import Groups, Request, TrainRequest
from strategies.local.objective import LocalRound
from strategies.local.site_method import SiteMethod
from strategies.local.training import Epoch, Examples, Frozen, TrainingTask, Validation, examples_of, validate
from strategies.registry import method_of


@dataclass(frozen=True)
class Work:
    """One request, unpacked: who does what with which network.

    Attributes:
        network: What is trained: the whole, or what is behind its frozen backbone.
        whole: The network from pixels to logits, around the same neck and head.
        received: The model as sent, with the parts that never left this site put back.
    """

    site: Site
    plan: Plan
    method: SiteMethod
    network: SplitNetwork
    whole: SplitNetwork
    received: ModelState
    folder: MemoryFolder
    memory: Memory
    _examples: dict[str, Examples] = field(default_factory=dict)

    def examples(self, part: str) -> Examples:
        """Images of ``train`` or ``validation`` with the labels of the rows the network has; made once a request."""
        if part not in self._examples:
            images, seen = self.site.trained_on(part, self.plan), self.seen(part)
            if part == "train" and (kept := self.site.kept_rows(images)) is not None:
                images, seen = images.rows(kept), at_rows(seen, kept)
            self._examples[part] = examples_of(images, seen, self.network.class_names)
        return self._examples[part]

    def seen(self, part: str) -> Tensor | Pixels:
        """What the network receives of each image of one part: its pixels, or its features."""
        pixels, features = self.site.pixels(part), self.network is not self.whole
        return features_of(self.site).of(self.whole, part, pixels, self.plan) if features else pixels

    def exercise(self, local: LocalRound, *, backbone_frozen: bool = False, epoch: Epoch | None = None) -> TrainingTask:
        """What is trained on, and how."""
        frozen, plan = Frozen(norm=self.method.frozen_norm, backbone=backbone_frozen), self.plan
        return TrainingTask(self.examples("train"), local.objective, plan.training, plan.augmentation, frozen, epoch)


def unpack(site: Site, request: Request) -> Work:
    """Fill the network with a request's model and with the parts of it that never left this site.

    Raises:
        BadInput: If the site has too few patients to take part.
        WireError: If the request's head rows are not those that this site holds in this method, the frozen part of the
            model is missing or another one than the plan names, or a covered round is to go on from itself.
    """
    site.refuse_few()
    plan = site.in_its_arithmetic(plan_of_text(request.plan))
    method, own = method_of(plan), site.declaration.canonical
    if method.traffic.rows == "own" and request.class_names != own:
        raise WireError(f"the request has head rows {quoted(request.class_names)}, this site has {quoted(own)}.")
    folder = site.memory(request.run)
    covered, trains = plan.privacy.covers, isinstance(request, TrainRequest)
    if covered and trains and request.counted >= max(request.round, 1):
        # Training writes over that memory, and no site could say afterwards which it went on from.
        raise WireError(f"round {request.round} is to go on from round {request.counted}, which is not before it.")
    memory = folder.recall(request.counted, site.tell, forget=trains, settled=covered)
    network = empty_network(plan.model, request.class_names, site.device, plan.training.memory_format, site.gpus)
    fill_frozen_part(network, site, request.frozen)
    whole = memory.parts.over(request.model).model()
    received = replace(whole, head=whole.head.rows(request.class_names))
    put(network, Groups.of_model(received))
    trained = NetworkOnFeatures(network) if trains_on_features(plan, method) else network
    return Work(site, plan, method, trained, network, received, folder, memory)


def put(network: SplitNetwork, groups: Groups) -> None:
    """Overwrite the groups that are there."""
    write_state(network, trunk=groups.trunk, norm=groups.norm, head=groups.head)


def validated(work: Work, validation: Examples) -> Validation:
    """How good the network is on the validation part; no class of few patients counts in the AUROC."""
    return validate(work.network, validation, work.method.loss, work.plan.training, work.site.hides("validation"))
