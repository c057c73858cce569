"""The Ray actor that runs the hospital's ClientApp for simulated sites, on any node of the cluster."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from flwr.clientapp import ClientApp

from polyclinic.common.config import Experiment
from polyclinic.common.errors import raise_faults
from polyclinic.common.simulation import cache_received_data
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.data.base.image_set import deserialize_dataset_splits
from polyclinic.data.images.pixel_cache import MemoryMappedPictures
from polyclinic.server.simulation.backends.cluster import collect_node_versions, find_node_version_faults
from polyclinic.server.simulation.backends.inline import (
    call_client_app,
    import_client_app,
    make_flower_context,
    silence_flower_logs,
)
from polyclinic.server.simulation.backends.site_files import (
    Change,
    FolderChangeTracker,
    apply_folder_changes,
    recreate_folder_with_files,
)
from polyclinic.server.simulation.backends.transfer import pack_flower_message, unpack_flower_message

SITES_FOLDER = "sites"
FROZEN_FOLDER = "frozen"
_PREFIX = f"polyclinic-worker-{socket.gethostname()}-"

WorkerAnswer = tuple[bytes, list[Any], list[Change], list[Change]]
"""Head of a reply, bytes of its arrays, changes of the site's folder, and changes of the folder of frozen layers."""


class SiteWorker:
    """Answers messages for any site of a run, one at a time, in a separate working folder.

    Args:
        scratch: Parent of the working folder; empty for the machine's temporary folder.
    """

    def __init__(self, scratch: str) -> None:
        parent = Path(scratch if os.path.isdir(scratch) else tempfile.gettempdir())
        for folder in parent.glob(f"{_PREFIX}*"):  # remove folders of killed workers
            with contextlib.suppress(ValueError):
                if not psutil.pid_exists(int(folder.name.removeprefix(_PREFIX).split("-")[0])):
                    shutil.rmtree(folder, ignore_errors=True)
        # The folder holds sites' state. On a cluster it may be in a temporary folder of all accounts of the node. So
        # mkdtemp creates a new folder that only this account may open.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self._app: ClientApp
        self._frozen: FolderChangeTracker
        silence_flower_logs()

    def set_up_worker(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Receive the data that all sites share: the experiment and the images.

        Args:
            setup: ``experiment`` (JSON); ``base`` (folder of its relative paths); ``sites`` (number of sites);
                ``facts`` and ``images`` of the data set; ``versions`` of the coordinator's machine, because this node
                may have joined late.

        Returns:
            ``node``, ``pid`` and number of ``gpus`` of this worker, for the run's events.

        Raises:
            BadInput: If the software versions of this node differ.
        """
        raise_faults(find_node_version_faults(setup["versions"], {socket.gethostname(): collect_node_versions()}))
        self._frozen = recreate_folder_with_files(self._folder / FROZEN_FOLDER, ())
        self._count = setup["sites"]
        base = Path(setup["base"])
        experiment = Experiment.model_validate_json(setup["experiment"])
        if setup["facts"]:  # else a plug-in of the data set reads the images here
            cache_received_data(
                experiment,
                base,
                deserialize_dataset_splits(
                    json.loads(setup["facts"]), setup["images"], MemoryMappedPictures.open_from_description
                ),
            )
        self._app = import_client_app(setup["experiment"], base, self._folder)
        context = ray.get_runtime_context()
        gpus = len(context.get_accelerator_ids().get("GPU", ()))
        return {"node": context.get_node_id(), "pid": os.getpid(), "gpus": gpus}

    def answer_message(self, call: dict[str, Any], *arrays: Any) -> WorkerAnswer:
        """Let the ClientApp answer a message for a site.

        Args:
            call: Name of the ``site`` and its index (``place``) in the partition; ``head`` of the message; ``files`` of
                the site's folder; ``frozen``: file name -> reference to a file of frozen layers in Ray's object store.
        """
        site_folder = recreate_folder_with_files(
            join_plain_name(self._folder / SITES_FOLDER, PlainName(call["site"])), call["files"]
        )
        missing = [name for name in sorted(call["frozen"]) if not (self._folder / FROZEN_FOLDER / name).exists()]
        if missing:
            apply_folder_changes(self._folder / FROZEN_FOLDER, ray.get([call["frozen"][name] for name in missing]))
            self._frozen = FolderChangeTracker(self._folder / FROZEN_FOLDER)
        message = unpack_flower_message(call["head"], [array.data for array in arrays])
        context = make_flower_context(call["place"], self._count)
        head, sent = pack_flower_message(call_client_app(self._app, message, context))
        data = [np.frombuffer(array, np.uint8) for array in sent]  # Ray copies these bytes once, ``bytes`` twice
        return head, data, site_folder.list_folder_changes(), self._frozen.list_folder_changes()

    def close(self) -> None:
        """Remove the worker's working folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
