"""The ``[policy]`` table of ``site.toml``: what the hospital lets out beside updates."""

from pydantic import Field

from common.toml_files import Section


class Policy(Section):
    """What the hospital lets out.

    Attributes:
        label_counts: Whether it tells how many training images show each class, where a method asks.
        score_histograms: Whether it tells how the final model's scores on its test part are spread, if asked.
        smallest_count: Of a class with fewer images, or with fewer without it, both stay unknown.
    """

    label_counts: bool = False
    score_histograms: bool = False
    smallest_count: int = Field(10, ge=0)
