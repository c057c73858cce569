"""A limit on the memory of a network while it is built, for a description that somebody else wrote."""

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
    """Raised when a network that is being built takes more memory than it may."""


@contextmanager
def limit_network_bytes(most: int) -> Iterator[None]:
    """Context manager that limits the bytes of all tensors that modules of this thread get inside of it.

    A layer gets each of its tensors before it draws their values. Until then the tensor has addresses and no memory, so
    a layer that is too large is stopped before it takes any.

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
        if registered > most:
            raise NetworkTooLarge

    hooks = (
        register_module_parameter_registration_hook(count_tensor),
        register_module_buffer_registration_hook(count_tensor),
    )
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # for one tensor that is larger than the machine
            raise NetworkTooLarge from None
        raise
    finally:
        for hook in hooks:
            hook.remove()
