"""How calls to the SuperLink are made again, and when they are not."""

import logging
from typing import Any

import httpx
from flwr.supercore.retry import make_simple_http_retry_invoker

from common.errors import CannotGoOn

LINK_PATIENCE_S = 900.0
"""How long a run waits for a SuperLink that does not answer."""
GIVEN_UP = "the SuperLink heard nothing of this run for too long, and gave it up."
_NOT_OURS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class SuperLinkGone(CannotGoOn):
    """The SuperLink did not answer for longer than a run can wait."""


class RunLost(RuntimeError):
    """The SuperLink has given this run up: it heard nothing of it for too long. It goes on as a new one."""


def quiet() -> None:
    """Keep Flower's own lines off the terminal; errors still come as exceptions."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def retrying() -> Any:
    """Tries again for a while, but not where the SuperLink has given the run up: Flower's own would send SIGINT."""
    invoker = make_simple_http_retry_invoker()
    invoker.max_time = LINK_PATIENCE_S
    by_flower: Any = invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _NOT_OURS:
            raise RunLost(GIVEN_UP) from None
        return bool(by_flower(error))

    invoker.should_giveup = gives_up
    return invoker
