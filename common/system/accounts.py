"""Work of root in the folders of another account, done with that account's rights.

In such a folder the account can exchange any file for a link between two calls of ours. Root, who follows the link,
would give the account a file of the system. The account, who follows it, gets no more than it has.
"""

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AccountIds:
    """Numbers of an account and of all its groups."""

    user: int
    group: int
    groups: tuple[int, ...]


def find_account_ids(name: str) -> AccountIds:
    """Return the numbers of an account of this machine.

    Raises:
        KeyError: If this machine has no such account.
    """
    entry = pwd.getpwnam(name)
    return AccountIds(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)))


@contextlib.contextmanager
def act_as_account(ids: AccountIds) -> Iterator[None]:
    """Give up root's rights for an account's in the ``with`` block; without root's rights change nothing.

    The rights are those of the whole process, all threads included.

    Raises:
        OSError: If this root may not take another account's rights, as in some containers.
    """
    if os.geteuid() != 0:
        yield
        return
    group = os.getegid()
    groups = os.getgroups()
    try:
        os.setgroups(ids.groups)
        os.setegid(ids.group)
        os.seteuid(ids.user)  # last: it gives up the right to change groups
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
