"""Exit codes of ``flwr-client``, and the exceptions with which it ends, each with a remedy."""

from enum import IntEnum
from typing import TYPE_CHECKING

from polyclinic.common import __version__
from polyclinic.common.wire.release_name import UNKNOWN_RELEASE
from polyclinic.common.wire.versions import WIRE_VERSION, describe_spoken_versions

if TYPE_CHECKING:
    import ssl

    from polyclinic.common.wire.fleet_protocol import HelloAnswer

# Verification errors of OpenSSL (X509_V_ERR_*).
_NOT_YET_VALID = 9
_EXPIRED = 10
_OTHER_HOST = 62
_OTHER_ADDRESS = 64


class ClientExitCode(IntEnum):
    """Exit codes of ``flwr-client``: the command ``start`` uses those below 20, the command ``check`` uses all.

    docs/troubleshooting.md prints these texts: the cause, and after the semicolon who or what helps.

    Attributes:
        STOPPED: Done, or `start` was stopped on request. `check`: nothing but notes.
        FAILED: A defect. `health`: not healthy. `audit verify`: something was changed or withheld; of a defect send us
            the log.
        BAD_INPUT: A fault in a file, an option or the data, each one listed; you.
        NO_TLS: The address speaks no TLS; check address, port and proxy.
        OTHER_AUTHORITY: The certificate or the kit is of another authority: a firewall that opens TLS, an old kit, or
            a stranger; the network team, then the coordinator by telephone.
        WRONG_HOST: The certificate is for another host name; the coordinator.
        EXPIRED: The certificate has expired or is not valid yet; the coordinator, or a clock.
        KEY: The key is not admitted or was revoked, or another copy of this folder runs; the coordinator, or
            [a new key](hospital-it.md#after-a-revoke).
        CLOCK: The clocks differ too much; NTP.
        NAME: The key belongs to another site's name; `name` in `site.toml`.
        VERSION: The wire versions are two apart, or the release builds another model; install the release that the
            message names.
        HOST_UNKNOWN: The host's name cannot be resolved; DNS.
        NO_ANSWER: Nobody answers; firewall, proxy, coordinator.
        DISK: The disk is nearly full; you.
        MEMORY: Too little memory; you, or a smaller batch.
        GPU: No GPU, or one that is too small; you, or a smaller batch.
        PERMISSIONS: Rights of the folder or of the key; you.
        COLUMN: A label column or class is not there; `site.toml`.
        EMPTY_FILES: Image files are empty; the person who exported them.
        UNREADABLE: Images cannot be read; the person who exported them.
        INVERTED: Images look inverted; the person who exported them.
        PATIENTS: Patients are on two sides of the split; `split_column`.
        DUPLICATES: The same image is there twice; the table.
        PIXELS: The images become other pixels than the run's; the line for `site.toml` that it prints.
        WORDS: A word for a class is not in the study's vocabulary; the line for `site.toml` that it prints.
        POLICY: This hospital's policy declines the run of `--experiment`; the coordinator, or the key of `[policy]`
            that it names.
        OPT_OUT: An identifier of `data.opt_out` fits no patient; compare it with the table: a typing error leaves a
            patient in training.
        TRAINING: The training step failed; send us the line that it prints.
    """

    STOPPED = 0
    FAILED = 1
    BAD_INPUT = 2
    NO_TLS = 10
    OTHER_AUTHORITY = 11
    WRONG_HOST = 12
    EXPIRED = 13
    KEY = 14
    CLOCK = 15
    NAME = 16
    VERSION = 17
    HOST_UNKNOWN = 20
    NO_ANSWER = 21
    DISK = 30
    MEMORY = 31
    GPU = 32
    PERMISSIONS = 33
    COLUMN = 40
    EMPTY_FILES = 41
    UNREADABLE = 42
    INVERTED = 43
    PATIENTS = 44
    DUPLICATES = 45
    PIXELS = 46
    WORDS = 47
    POLICY = 48
    OPT_OUT = 49
    TRAINING = 50


def describe_release_to_install(release: str) -> str:
    """Return the words by which an instruction names a release, also if the coordinator does not state its release."""
    return "the coordinator's release (ask which one that is)" if release == UNKNOWN_RELEASE else f"release {release}"


class CoordinatorUnreachable(Exception):
    """Raised if the coordinator does not answer; a later try may succeed."""


class ConnectionNotAccepted(Exception):
    """Raised if the coordinator does not accept this site, or this site does not accept the coordinator.

    Attributes:
        may_pass: True if a later try may succeed, because the coordinator may be about to admit the site.
    """

    def __init__(self, exit_code: ClientExitCode, problem: str, remedy: str, *, may_pass: bool = False) -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.exit_code = exit_code
        self.problem = problem
        self.remedy = remedy
        self.may_pass = may_pass

    @classmethod
    def make_key_refusal_error(cls, why: str) -> "ConnectionNotAccepted":
        """Make the exception for a key that the coordinator does not accept."""
        remedy = "Ask the coordinator whether this site is admitted; "
        remedy += "a revoked site makes a new key: flwr-client init DIR --renew-key."
        return cls(
            ClientExitCode.KEY, f"the coordinator does not accept this site's key ({why}).", remedy, may_pass=True
        )

    @classmethod
    def make_newer_process_error(cls, why: str) -> "ConnectionNotAccepted":
        """Make the exception for an old process, after a newer process has connected with the same key."""
        remedy = (
            "Only one may run: keep one copy of the site's folder and remove the others. If nobody here started"
            " another one, the key is stolen: have the coordinator revoke it."
        )
        return cls(ClientExitCode.KEY, f"{why}; this one stops.", remedy)

    @classmethod
    def make_clock_difference_error(cls) -> "ConnectionNotAccepted":
        """Make the exception for clocks that differ: Flower rejects signatures over 5 minutes old or in the future."""
        remedy = "Set the clock (NTP) here or there."
        return cls(ClientExitCode.CLOCK, "the clocks of this site and of the coordinator differ too much.", remedy)

    @classmethod
    def make_wire_version_error(cls, hello: "HelloAnswer") -> "ConnectionNotAccepted":
        """Make the exception for a coordinator whose release has no wire version in common with this release."""
        problem = (
            f"the coordinator's release {hello.release} speaks wire version {hello.newest_wire}, this site's release "
            f"{__version__} speaks {describe_spoken_versions()}."
        )
        if hello.newest_wire > WIRE_VERSION:
            remedy = f"Install {describe_release_to_install(hello.release)} here."
        else:
            remedy = f"Ask the coordinator to install release {__version__}, or install "
            remedy += f"{describe_release_to_install(hello.release)} here."
        return cls(ClientExitCode.VERSION, problem, remedy)

    @classmethod
    def make_certificate_error(cls, error: "ssl.SSLCertVerificationError", host: str) -> "ConnectionNotAccepted":
        """Make the exception for a certificate that OpenSSL rejects: of another host, expired, or of another issuer."""
        if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
            remedy = "The coordinator adds this name with flwr-server init DIR --renew --host ..., "
            remedy += "or the kit names another."
            return cls(ClientExitCode.WRONG_HOST, f"the coordinator's certificate is not for {host}.", remedy)
        if error.verify_code == _EXPIRED:
            remedy = "The coordinator runs flwr-server init DIR --renew. If it has not, this machine's clock is wrong."
            return cls(ClientExitCode.EXPIRED, "the coordinator's certificate has expired.", remedy)
        if error.verify_code == _NOT_YET_VALID:
            remedy = "This machine's clock, or the coordinator's, is wrong."
            return cls(ClientExitCode.EXPIRED, "the coordinator's certificate is not valid yet.", remedy)
        problem = f"{host} does not show the certificate of this kit's coordinator ({error.verify_message})."
        remedy = "Another machine answers, a firewall opens TLS on the way, or the kit is an old one: "
        remedy += "ask for a new kit. flwr-client check names who issued what is shown."
        return cls(ClientExitCode.OTHER_AUTHORITY, problem, remedy)
