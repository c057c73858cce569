"""A limit on the memory of a network while it is built from a description of another person."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy


class NetworkTooLarge(Exception):
    """Raised when a network that is being built exceeds its memory limit."""


@contextmanager
def limit_network_bytes(limit: int) -> Iterator[None]:
    """Limit the bytes of all tensors that modules of this thread register inside the ``with`` block.

    A layer registers each tensor before it draws the values. Until then the tensor has addresses but no memory, so a
    layer that is too large is stopped before it uses any.

    Args:
        limit: Maximum number of bytes.

    Raises:
        NetworkTooLarge: At the module that exceeds the limit.
    """
    registered = 0
    thread = threading.get_ident()

    def count_tensor(module: nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal registered
        if value is None or is_lazy(value) or value.is_meta or threading.get_ident() != thread:
            return
        registered += value.nbytes
        if registered > limit:
            raise NetworkTooLarge

    hooks = (
        register_module_parameter_registration_hook(count_tensor),
        register_module_buffer_registration_hook(count_tensor),
    )
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # a single tensor exceeds the machine's memory
            raise NetworkTooLarge from None
        raise
    finally:
        for hook in hooks:
            hook.remove()
