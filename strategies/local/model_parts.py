"""The parts of a method's model: which of them sites send, which stay at a site, and the head rows of each site."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from polyclinic.common.contract import LabelContract
from polyclinic.common.models.zoo.spec import Task
from polyclinic.strategies.local.method_traits import Payload, TrunkRule


@dataclass(frozen=True)
class ModelParts:
    """Trunk, batch normalisation and head rows of a model, as a method divides them between sites and federation.

    Attributes:
        payload: The data that sites send and receive.
        trunk: How the trunk is averaged.
        task: The task of the run.
        trains_own_model: True if a site also trains a whole model of its own.
    """

    payload: Payload
    trunk: TrunkRule
    task: Task
    trains_own_model: bool

    @cached_property
    def sends_batch_norm(self) -> bool:
        """Return True if batch normalisation is averaged with the trunk."""
        return self.payload.trunk and self.trunk == "fedavg"

    @cached_property
    def keeps_batch_norm_local(self) -> bool:
        """Return True if batch normalisation is trained at each site and never sent."""
        return self.trunk == "fedbn"

    @cached_property
    def freezes_batch_norm(self) -> bool:
        """Return True if batch normalisation is neither trained nor updated."""
        return self.trunk == "fedbn_plus"

    @cached_property
    def has_global_model(self) -> bool:
        """Return True if training results in one model for all sites and classes, which all of them use."""
        has_global_norm = self.sends_batch_norm or self.freezes_batch_norm
        return self.payload.trunk and self.payload.head and has_global_norm and not self.trains_own_model

    @cached_property
    def keeps_local_parts(self) -> bool:
        """Return True if a site keeps parts of its model that it never sends."""
        return not self.has_global_model

    @cached_property
    def trains_alone(self) -> bool:
        """Return True if every site trains alone, so that no model part is averaged."""
        return not self.payload.trunk and not self.payload.head

    # ------------------------------------------------------------------ head rows

    def select_own_rows(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """Return the head rows that a site holds, in the order of its own head."""
        return contract.sites[site] if self.payload.rows == "own" else contract.class_names

    @cached_property
    def tests_all_rows(self) -> bool:
        """Return True if a site tests the model with the head rows of all classes, though it trains with its own alone.

        Where classes of pixels exclude one another, a pixel goes to the highest row. The model that the run saves
        decides among all classes; one of fewer rows has fewer rivals, and its Dice would flatter the saved model.
        """
        is_exclusive = self.task == "exclusive_segmentation"
        return is_exclusive and self.has_global_model and self.payload.rows == "own"

    def select_test_rows(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """Return the head rows with which a site tests the model: its own, or those of all classes."""
        return contract.class_names if self.tests_all_rows else self.select_own_rows(site, contract)

    def select_sent_rows(self, held: tuple[str, ...], annotated: Collection[str]) -> tuple[str, ...]:
        """Return the classes whose head rows a site sends: all that it holds, or only those that it annotates.

        The method's :attr:`Payload.sends_rows` decides between the two.

        Args:
            held: Classes whose head rows the site holds.
            annotated: Classes that the site annotates, so that its images have labels for them.
        """
        if self.payload.sends_rows == "all":
            return held
        return tuple(name for name in held if name in annotated)
