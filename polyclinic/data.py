"""The types of a package that brings a data set of its own: a function with this signature, as an entry point.

The entry point stands in the group ``polyclinic.datasets``. The function takes the folder of the file that names the
data set and ``data.options``, and returns :class:`LabelledImages`.
"""

from common.data.sources.plugin import DatasetPlugin, LabelledImages

__all__ = ["DatasetPlugin", "LabelledImages"]
