"""Approvers of a hospital, and what they type."""

import datetime as dt
import io
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from polyclinic.client.site.plans import PlanStore
from polyclinic.common.security.plan_decisions import parse_decision, read_sealed_approver_key, sign_decision
from tests.network.real import flwr_client
from tests.server.commands import Ended

WEBER, KHAN = "Dr. A. Weber", "N. Khan"
PASSPHRASE = "green apple, seven boats"


def typed(*arguments: object, passphrase: str = PASSPHRASE) -> Ended:
    """A command of ``flwr-client`` with a passphrase on standard input."""
    with patch("sys.stdin", io.StringIO(f"{passphrase}\n")):
        return flwr_client(*arguments)


@dataclass(frozen=True)
class Approver:
    """A person with a key: the file of the private key, and the line for ``site.toml``."""

    name: str
    key: Path
    line: str

    def approve(self, site: Path, digits: str, until: str = "2099-12-31", *more: object) -> Ended:
        return typed("plans", "approve", site, digits, "--as", self.name, "--until", until, "--key", self.key, *more)

    def approve_until(self, site: Path, sha256: str, end: dt.datetime) -> Path:
        """Approve a plan until a time of any day, as the command does until the end of a day; return the file."""
        assert self.approve(site, sha256).code == 0
        path = PlanStore(site / "state").list_decisions(sha256)[-1]
        decision, _ = parse_decision(path.read_bytes())
        until = end.astimezone(dt.UTC).isoformat(timespec="seconds")
        key = read_sealed_approver_key(self.key).open_with(PASSPHRASE)
        path.write_bytes(sign_decision(decision.model_copy(update={"until": until}), key))
        return path

    def deny(self, site: Path, digits: str, reason: str = "no legal basis") -> Ended:
        return typed("plans", "deny", site, digits, "--as", self.name, "--reason", reason, "--key", self.key)


def add_approver(folder: Path, name: str = WEBER) -> Approver:
    """Make a person's key by the command, and read the line that it prints."""
    key = folder / f"{name}.approver"
    made = typed("approvers", "add", name, "--out", key)
    assert made.code == 0, made.err
    (line,) = (line for line in made.out.splitlines() if ' = "ssh-ed25519 ' in line)
    return Approver(name, key, line)


def write_approvers(site_toml: Path, *approvers: Approver) -> None:
    """Write these people, and nobody else, into the table ``[approvers]`` at the end of a ``site.toml``."""
    text = site_toml.read_text(encoding="utf-8").partition("\n[approvers]\n")[0]
    lines = "\n".join(approver.line for approver in approvers)
    site_toml.write_text(f"{text}\n[approvers]\n{lines}\n", encoding="utf-8")


def stored_plans(site: Path) -> list[str]:
    """The hashes of the plans that a site stores."""
    folder = site / "state" / "plans"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
