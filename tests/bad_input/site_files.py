"""site.toml, through ``flwr-client start``."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.client.site.site_file import make_site_toml
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.common.system.toml import to_toml_text
from polyclinic.server.coordinator.authority import make_certificate_authority
from polyclinic.server.coordinator.folder import CoordinatorFolder, CoordinatorTomlContent
from tests.bad_input.catalogue import Case, Ended, client

# ---------------------------------------------------------------------- a key pair, a request and a kit, made once

_PRIVATE = ec.derive_private_key(7, ec.SECP256R1())
KEY = _PRIVATE.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()).decode()
LINE = format_public_key_line(_PRIVATE, "north")
OTHER_LINE = format_public_key_line(ec.derive_private_key(8, ec.SECP256R1()), "south")


@lru_cache
def authority() -> str:
    """PEM of an authority's certificate."""
    with TemporaryDirectory() as folder:
        made = CoordinatorFolder(Path(folder), CoordinatorTomlContent(name="trial", hosts=("fl.example",), port=1))
        make_certificate_authority(made)
        return made.ca_certificate_path.read_text(encoding="ascii")


def request_text(**other: str) -> str:
    return _text({"site": "north", "public_key": LINE} | other)


def kit_text(**other: str) -> str:
    kit = {"coordinator": "trial", "address": "fl.example:9092", "site": "north", "public_key": LINE}
    return _text(kit | {"ca_certificate": authority()} | other)


def _text(fields: dict[str, str]) -> str:
    return "".join(f"{key} = {to_toml_text(value)}\n" for key, value in fields.items())


# ---------------------------------------------------------------------- site.toml

HEAD = 'name = "north"\n'
DATA = '[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


def start(folder: Path, text: str) -> Ended:
    """With the key and the kit that belong to the name."""
    (folder / "site.toml").write_text(text, encoding="utf-8")
    (folder / "north.key").write_text(KEY, encoding="ascii")
    (folder / "north.key").chmod(0o600)
    (folder / "north.kit").write_text(kit_text(), encoding="utf-8")
    return client("start", folder)


def saying(text: str) -> Callable[[Path], Ended]:
    return lambda folder: start(folder, text)


CASES = (
    Case("there is none", lambda folder: client("start", folder)),
    Case("no folder", lambda folder: client("start", folder / "nrth")),
    Case("a quote is missing", saying('name = "north\n' + DATA)),
    Case("a path with Windows' backslashes", saying(f'{HEAD}[data]\nkind = "npz"\npath = "D:\\scans\\a.npz"\n')),
    Case("as init wrote it, nothing filled in", saying(make_site_toml("north"))),
    Case("no name", saying(DATA)),
    Case("a name that leads elsewhere", saying(f'name = "../north"\n{DATA}')),
    Case("a name that is too long", saying(f'name = "{"n" * 201}"\n{DATA}')),
    Case("no data", saying(HEAD)),
    Case("data that is no table", saying(f'{HEAD}data = "labels.csv"\n')),
    Case("an unknown key", saying(f"{HEAD}polcy = 1\n{DATA}")),
    Case("an unknown key of the data", saying(f"{HEAD}{DATA}imags = 20\n")),
    Case("a key that belongs to another kind of data", saying(f'{HEAD}{DATA}label_columns = ["Mass"]\n')),
    Case("no GPU but a device", saying(f"{HEAD}gpus = 0\n{DATA}")),
    Case("an unknown device", saying(f'{HEAD}device = "gpu"\n{DATA}')),
    Case("a policy that is no table", saying(f"{HEAD}policy = true\n{DATA}")),
    Case("a policy that neither says yes nor no", saying(f'{HEAD}{DATA}[policy]\nlabel_counts = "perhaps"\n')),
    Case("a smallest count below 0", saying(f"{HEAD}{DATA}[policy]\nsmallest_count = -1\n")),
    Case("classes that are no list", saying(f'{HEAD}{DATA}annotates = "Mass"\n')),
    Case("a class that the data do not have", saying(f'{HEAD}{DATA}annotates = ["Mas"]\n')),
    Case("a class twice", saying(f'{HEAD}{DATA}annotates = ["Mass", "Mass"]\n')),
    Case("synonyms that are no table", saying(f'{HEAD}{DATA}synonyms = ["Mass"]\n')),
    Case("a synonym of a label that is none", saying(f'{HEAD}{DATA}[data.synonyms]\nMas = "Tumour"\n')),
    Case("a synonym whose class nobody has named", saying(f'{HEAD}{DATA}[data.synonyms]\nMass = "???"\n')),
    Case("data that are not there", saying(f'{HEAD}[data]\nkind = "npz"\npath = "absent.npz"\n')),
    Case("a path that no file can have", saying(f'{HEAD}[data]\nkind = "npz"\npath = "{"x" * 300}.npz"\n')),
    Case("several faults at once", saying(f'name = "../north"\ndevice = "gpu"\npolcy = ""\n{DATA}imags = 20\n')),
)
