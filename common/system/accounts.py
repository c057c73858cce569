"""Work with the rights of another account, for root in folders of that account.

In its folders an account can replace any file by a link between two of our calls. Root would follow the link, and could
give the account access to a system file. The account itself, following the link, gains nothing.
"""

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AccountIds:
    """User id, group id and ids of all groups of an account."""

    user: int
    group: int
    groups: tuple[int, ...]


def find_account_ids(name: str) -> AccountIds:
    """Return the ids of an account of this machine.

    Raises:
        KeyError: If this machine has no such account.
    """
    entry = pwd.getpwnam(name)
    return AccountIds(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)))


@contextlib.contextmanager
def act_as_account(ids: AccountIds) -> Iterator[None]:
    """Act with the rights of an account instead of root's inside the ``with`` block; a process without root's rights
    does not change.

    The rights apply to the whole process, including all threads.

    Raises:
        OSError: If root may not take another account's rights, as in some containers.
    """
    if os.geteuid() != 0:
        yield
        return
    group = os.getegid()
    groups = os.getgroups()
    try:
        os.setgroups(ids.groups)
        os.setegid(ids.group)
        os.seteuid(ids.user)  # must be last, because it gives up the right to change groups
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
