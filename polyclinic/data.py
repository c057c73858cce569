"""Types for a data set plug-in: a package with a function that loads images, registered as an entry point.

The group of the entry point is ``polyclinic.datasets``. The function has two parameters, the folder of the experiment
(or of a hospital's ``site.toml``) and ``data.options``, and returns :class:`LabelledImages`.
"""

from common.data.sources.plugin import DatasetPlugin, LabelledImages

__all__ = ["DatasetPlugin", "LabelledImages"]
