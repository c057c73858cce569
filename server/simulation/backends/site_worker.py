"""What runs on a node of a Ray cluster: the hospital's app, for the site that a message is for."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from flwr.clientapp import ClientApp

from common.config import Experiment
from common.data.base.image_set import put_together
from common.errors import stop_on
from common.simulation import receive_data
from server.simulation.backends.cluster import version_faults, versions
from server.simulation.backends.inline import answered, context_of, prepare_flower, site_app
from server.simulation.backends.own_ray.ray_worker import FORKED
from server.simulation.backends.packing import ArrayBytes, packed, unpacked
from server.simulation.backends.site_files import Change, WatchedFolder, make_changes, replace_folder

SITES, FROZEN = "sites", "frozen"
_PREFIX = f"polyclinic-worker-{socket.gethostname()}-"
_HASHES_KEPT = 64

Answer = tuple[bytes, list[Any], list[str], list[Change], list[Change]]


class SiteWorker:
    """Serves any site of a run, one message at a time, from a folder of its own.

    Args:
        scratch: Where that folder is made; empty for the machine's place for such things.
    """

    def __init__(self, scratch: str) -> None:
        place = Path(scratch if os.path.isdir(scratch) else tempfile.gettempdir())
        _remove_left_behind(place)
        self._folder = place / f"{_PREFIX}{os.getpid()}"
        self._sites: dict[str, WatchedFolder] = {}
        self._hashes: dict[str, str] = {}
        self._app: ClientApp
        self._frozen: WatchedFolder
        prepare_flower()

    def set_up(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Receive the experiment and the images: what all sites of this worker share.

        Args:
            setup: ``experiment`` (JSON), ``base``, ``sites`` (how many), ``facts`` and ``images`` of the data set,
                ``versions`` of the coordinator's machine: a node may have joined since all were checked.

        Returns:
            Where this worker is: ``node`` and number of ``gpus``, for the run's events; whether it was ``forked``.

        Raises:
            BadInput: If this node has other versions.
        """
        stop_on(version_faults(setup["versions"], {socket.gethostname(): versions()}))
        self._frozen = replace_folder(self._folder / FROZEN, ())
        self._count, base = setup["sites"], Path(setup["base"])
        experiment = Experiment.model_validate_json(setup["experiment"])
        receive_data(experiment, base, put_together(json.loads(setup["facts"]), setup["images"]))
        self._app = site_app(setup["experiment"], base, self._folder)
        about = ray.get_runtime_context()
        return {
            "node": about.get_node_id(),
            "pid": os.getpid(),
            "gpus": len(about.get_accelerator_ids().get("GPU", ())),
            "forked": FORKED in os.environ,
        }

    def answer(self, call: dict[str, Any], *arrays: Any) -> Answer:
        """Have a site answer a message.

        Args:
            call: ``site``, ``node``, ``head``; ``hashes`` and ``keys`` of the arrays; ``files`` (the site's folder,
                None where this worker has the newest) and ``frozen`` (parts of models that it lacks).

        Returns:
            The reply's head, its arrays' bytes, their hashes, and what changed in the site's folder and among the
            frozen parts.
        """
        site = call["site"]
        if call["files"] is not None or site not in self._sites:
            self._sites[site] = replace_folder(self._folder / SITES / site, call["files"] or ())
        make_changes(self._folder / FROZEN, call["frozen"])
        self._frozen = WatchedFolder(self._folder / FROZEN) if call["frozen"] else self._frozen
        keys = call["keys"]
        known = [call["hashes"][place] or self._hashes.get(key, "") for place, key in enumerate(keys)]
        message = unpacked(call["head"], [ArrayBytes(one.data, sha) for one, sha in zip(arrays, known, strict=True)])
        reply = answered(self._app, message, context_of(call["node"], self._count))
        self._keep_hashes(keys, packed(message)[1])
        head, sent = packed(reply)
        return head, [_bytes(one) for one in sent], [one.known_hash for one in sent], *self._changes(site)

    def _changes(self, site: str) -> tuple[list[Change], list[Change]]:
        return self._sites[site].changes(), self._frozen.changes()

    def _keep_hashes(self, keys: Sequence[str], arrays: Sequence[ArrayBytes]) -> None:
        """The next site gets the same trunk."""
        self._hashes |= {key: one.known_hash for key, one in zip(keys, arrays, strict=True) if key}
        for key in list(self._hashes)[:-_HASHES_KEPT]:
            del self._hashes[key]

    def close(self) -> None:
        """Remove the worker's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _bytes(array: ArrayBytes) -> Any:
    """Ray copies the bytes of a numpy array once, and those of ``bytes`` twice."""
    return np.frombuffer(array.data, np.uint8)


def _remove_left_behind(place: Path) -> None:
    """Folders of workers that were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError):
            if not psutil.pid_exists(int(folder.name.removeprefix(_PREFIX))):
                shutil.rmtree(folder, ignore_errors=True)
