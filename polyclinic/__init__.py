"""The public package of Polyclinic: what other people's programs import. Everything else is the product's inside.

:mod:`polyclinic.flower` has the methods as strategies for any Flower app.
"""

from common import __version__

__all__ = ["__version__"]
