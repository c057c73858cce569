"""The socket of a live view, had before anything else begins."""

import socket

from common.errors import BadInput, Fault


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        BadInput: If the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except (OSError, OverflowError) as error:
        problem = f"cannot be listened on at {address}: {error}."
        raise BadInput([Fault(f"--port {port}", problem, "Name another with --port.")]) from None
