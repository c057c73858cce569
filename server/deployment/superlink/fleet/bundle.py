"""The app bundle that a site asks for before it works: a name and nothing more, for every run the same.

Flower delivers a run's code in it. Ours carries none, and a site refuses one that does.
"""

import hashlib
import io
import zipfile

APP = """[project]
name = "polyclinic"
version = "1"
description = "Names the app that every site has installed; carries no code."
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "polyclinic"
[tool.flwr.app.components]
serverapp = "installed:on_the_coordinator"
clientapp = "installed:at_the_site"
[tool.flwr.app.config]
"""


def packed(content: str) -> bytes:
    """A bundle with this ``pyproject.toml``; the same bytes at any time."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr(zipfile.ZipInfo("pyproject.toml"), content)  # with no time of its own
    return archive.getvalue()


BUNDLE = packed(APP)
BUNDLE_SHA256 = hashlib.sha256(BUNDLE).hexdigest()
