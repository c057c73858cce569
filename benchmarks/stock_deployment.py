"""What ``flwr`` does at a stock SuperLink, for the comparison in ``network.py``: register nodes and start a run.

Flower has no public way to do this in a program. So this file uses names that are not public, from Flower 1.40 to 1.42;
``tests/test_flower_names.py`` lists it.
"""

import hashlib
from collections.abc import Mapping

from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor


class StockControl:
    """Flower's own client of a SuperLink's Control API, over TLS.

    Args:
        address: Host and port.
        authority: Certificate of the SuperLink's authority (PEM).
    """

    def __init__(self, address: str, authority: bytes) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self._client = ControlHttpClient.from_server_address(address, False, authority, [version])

    def register_node(self, name: str, public_key: bytes) -> None:
        """Register a SuperNode by its public key (PEM)."""
        self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))

    def start_run(self, files: Mapping[str, bytes], settings: Mapping[str, bool | float | int | str]) -> None:
        """Start a run of an app of these files."""
        content, _ = build_fab_from_files(files)
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        self._client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings))))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
