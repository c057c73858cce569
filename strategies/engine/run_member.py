"""A site that takes part in a run, with its answer to the roll call."""

from dataclasses import dataclass

from pydantic import ValidationError

from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.security.signatures import SignedStatement
from polyclinic.common.wire.records import RollCallAnswer
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.data.base.pixel_form import PixelForm


@dataclass(frozen=True)
class RunMember:
    """A site that takes part in the run: its answer to the roll call, and the bytes of the request and the answer.

    Attributes:
        signed: The signature of the site's answer; None in simulation.
        wire: The wire version of the answer, which is the one that was agreed on with the site.
    """

    node_id: int
    answer: RollCallAnswer
    bytes_down: int
    bytes_up: int
    signed: SignedStatement | None = None
    wire: int = WIRE_VERSION

    @property
    def label_declaration(self) -> LabelDeclaration:
        """Return the labels that the site annotates, by the site's own names and by canonical names."""
        answer = self.answer
        return LabelDeclaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))

    def read_pixel_form(self) -> PixelForm | None:
        """Return the form of the site's pixels; None if the site does not state it, or this release cannot read it."""
        try:
            return PixelForm.model_validate_json(self.answer.pixels)
        except ValidationError:
            return None
