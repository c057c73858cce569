"""Types for a data set plug-in: a package with a function that loads images, registered as an entry point.

The group of the entry point is ``polyclinic.datasets``. The function has two parameters, the folder of the experiment
(or of a hospital's ``site.toml``) and ``data.options``. It returns :class:`LabelledImages`, or a dictionary of these by
part (``train``, ``test`` and, if there is one, ``validation``).
"""

from polyclinic.common.data.sources.plugin import DatasetPlugin, LabelledImages

__all__ = ["DatasetPlugin", "LabelledImages"]
