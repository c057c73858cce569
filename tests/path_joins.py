"""Every place in the product where a path is made of a folder and a name that is not written there itself.

Found by the syntax tree: ``folder / name``, ``Path(a, b)``, ``os.path.join``, ``joinpath`` and ``with_name``. A name in
capital letters is a constant of ours. All other names are reviewed here, by where they come from.
"""

import ast
import re
from collections.abc import Iterator

from tests.processes import ROOT

PACKAGES = ("client", "server", "common", "data", "strategies", "studies")
_FOLDERS = (
    "aside|assets|at|base|below|cache|data|dir|file|folder|folders|home|memory|moved|out|parent|path|paths|place|"
    "program|root|run|scratch|site|source|state|updates"
)
_FOLDER = re.compile(rf"(^|_)({_FOLDERS})$", re.IGNORECASE)
"""Names of variables and fields that hold a path, beside every division by a text."""
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_JOINING = ("joinpath", "with_name", "with_stem")


def find_path_joins() -> set[tuple[str, str]]:
    """Return file and expression of every join; those of :func:`join_plain_name` have no such form."""
    return {
        (path.relative_to(ROOT).as_posix(), ast.unparse(node))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in _iterate_joins(ast.parse(path.read_text(encoding="utf-8")))
    }


def _iterate_joins(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if not _is_written_here(node.right) and (isinstance(node.right, ast.JoinedStr) or _is_path(node.left)):
                yield node
        elif isinstance(node, ast.Call) and any(not _is_written_here(argument) for argument in node.args):
            name = _last_name(node.func)
            is_method = isinstance(node.func, ast.Attribute)
            of_path_module = isinstance(node.func, ast.Attribute) and _last_name(node.func.value) == "path"
            joins = (is_method and name in _JOINING) or (of_path_module and name == "join")
            if joins or (not is_method and name in ("Path", "PurePath") and len(node.args) > 1):
                yield node


def _is_written_here(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or bool(_CONSTANT.fullmatch(_last_name(node)))


def _is_path(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        is_text = isinstance(node.right, ast.JoinedStr) or isinstance(getattr(node.right, "value", None), str)
        return is_text or _is_path(node.left)
    if isinstance(node, ast.Call) and _last_name(node.func) in ("Path", "join_plain_name", "resolve", "absolute"):
        return True
    return bool(_FOLDER.search(_last_name(node)))


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.id if isinstance(node, ast.Name) else ""


REVIEWED = {
    "a path that this machine's own account wrote into its file or command line, or that its system names": {
        "client/check/data.py: settings.folder / spec.labels",
        "client/service.py: settings.folder / ledger_path",
        "client/site/site_file.py: folder / images",
        "client/site/site_file.py: folder / str(data.get('labels'))",
        "client/site/site_file.py: self.folder / self.file.key",
        "client/site/site_file.py: self.folder / self.file.kit",
        "common/evaluation/foreign.py: self.path.parent / self.described.file",
        "common/evaluation/reading.py: base / spec.labels",
        "common/config.py: path.parent / parent",
        "data/dicomweb/archive.py: base / spec.ca_file",
        "data/dicomweb/archive.py: base / spec.cache",
        "data/sources/dicomweb.py: base / spec.labels",
        "data/sources/npz.py: base / spec.path",
        "data/tables/files.py: Path(self.folder, self.names[row])",
        "data/tables/files.py: os.path.join(folder, parent or slash)",
        "data/tables/files.py: os.path.join(os.path.relpath(path, folder), file)",
        "common/system/service_files.py: Path('/etc') / below",
        "common/system/service_files.py: Path(os.environ.get('XDG_RUNTIME_DIR', '/nowhere'), 'systemd')",
        "common/system/service_files.py: Path(sys.executable).with_name(program.name)",
        "data/tables/files.py: os.path.join(place, entry)",
        "data/tables/files.py: folder / below",
        "data/tables/files.py: folder / below / name",
        "data/tables/mask_folders.py: folder / hospital",
        "data/tables/files.py: os.path.join(place, part if entry is None else entry)",
        "data/tables/files.py: os.path.join(root, path)",
        "data/tables/labels.py: base / name",
        "data/tables/labels.py: base / spec.labels",
        "data/tables/labels.py: os.path.join(table.files.folder, name)",
        "data/tables/presets.py: base / spec.test_list",
        "data/tables/presets.py: base / spec.train_val_list",
        "client/site/patient_ledger.py: settings.folder / _expand_home(ledger_path)",
        "data/base/spec.py: base / spec.labels",
        "data/connections.py: base / spec.labels",
        "data/tables/files.py: os.path.join(parent, name)",
        "data/tables/files.py: os.path.join(folder, name)",
        "data/tables/presets.py: folder / first",
        "data/tables/presets.py: folder / path",
        "data/tables/search.py: self.root / path",
        "data/tables/search.py: self.root / folders[0]",
        "common/hosts.py: path.parent / entry.ca_file",
        "common/hosts.py: path.parent / entry.secret_file",
        "common/models/weights.py: base / weights",
        "common/plugins/files.py: os.path.join(path.parent, os.fsdecode(folder.strip()))",
        "common/simulation.py: base / section.image_cache",
        "common/system/resources.py: place / name",
        "common/system/resources.py: root / group.strip('/')",
        "server/export/evaluation.py: base / run_spec.images",
        "common/prediction/pictures.py: data / name",
        "common/prediction/masks.py: out / file",
        "common/prediction/dicom_segmentation.py: place.with_name(f'{place.name}{SEGMENTATION_SUFFIX}')",
        "common/prediction/masks.py: place.with_name(f'{place.name}.nii.gz')",
        "common/prediction/masks.py: place.with_name(f'{place.name}.png')",
        # Of a class's name letters, digits and " -_." remain.
        "common/prediction/masks.py: place.with_name(f'{place.name}.{part}')",
        "data/tables/masks.py: Path(masks.folder, name)",
        "common/prediction/pictures.py: data / below",
        "common/prediction/pictures.py: data / below / name",
        "studies/init/table.py: os.path.join(*place)",
        "studies/init/table.py: root / folder",
        "studies/init/table.py: self.folder / path",
        "studies/init/pictures.py: folder / name",
        "studies/init/found_masks.py: folder / column.cells[column.places[row]]",
        "studies/init/found_masks.py: located.folder / path",
        "studies/init/found_masks.py: search.root / cell",
        "studies/init/table.py: masks.folder / cell",
        "studies/init/table.py: pictures.folder / name",
        "studies/init/table.py: root / path",
        "server/simulation/simulate.py: self.file.base_folder / table",
        "strategies/method_list.py: file.base_folder / name",
        "studies/benchmark.py: out / run.results_key",
        "studies/benchmark.py: scratch / run.results_key",
        "studies/benchmark_results.py: folder / shared.read_text(encoding='utf-8').strip()",
        "studies/benchmark_scores.py: folder / f'labels-{planned.data}.csv.gz'",
        "studies/benchmark_scores.py: folder / f'{planned.results_key}.csv.gz'",
        "studies/benchmark_file.py: self.folder / f'{data}.toml'",
    },
    "a number, or a name that our code chooses among its own": {
        "client/withdrawal/withdraw.py: settings.state_folder / name",
        "client/withdrawal/withdraw.py: state / name",
        "server/delivery/packages.py: folder / name",
        "server/runs/retention.py: run_folder / name",
        "studies/example_files.py: folder / name",
        "studies/init/mimic.py: table.parent / f'{name}.gz'",
        "studies/init/mimic.py: table.parent / name",
        "studies/init/public.py: table.parent / f'{key}.txt'",
        "common/examples.py: source / name",
        "client/preview/attack/membership.py: adversary.folder / 'shadows' / str(number)",
        "client/preview/dry_run.py: out / f'{name}.json'",
        "client/preview/dry_run.py: out / f'{name}.record'",
        "client/site/memory.py: self.folder / f'opened-{server_round:06d}'",
        "client/site/memory.py: self.folder / f'round-{server_round:06d}.safetensors'",
        "client/site/settings.py: settings.state_folder / f'images-{form}'",
        "client/site/key_renewal.py: settings.key_path.with_name(f'.{settings.key_path.name}.new')",
        "client/site/key_renewal.py: state / name",
        "client/site/site_file.py: folder / file",
        "client/training/features.py: self.folder / f'{part}.features'",
        "data/images/pixel_cache.py: folder.with_name(f'.{folder.name}.{os.getpid()}')",
        "data/images/pixel_cache.py: moved / name",
        "data/images/store.py: root / make_keyed_blake3_hash(store.secret).update(text.encode()).hexdigest(16)",
        "common/metrics/bootstrap.py: below / len(wide)",
        "common/models/zoo/spec.py: folder / name",
        "common/security/audit.py: self.folder / f'audit-{len(list_audit_files(self.folder)):06d}.jsonl'",
        "common/system/files.py: path.with_name(f'.{path.name}.{os.getpid()}-{threading.get_ident()}.part')",
        "common/system/preflight.py: out / name",
        "server/coordinator/authority.py: coordinator.authority_path / f'{stem}.crt'",
        "server/coordinator/authority.py: coordinator.authority_path / f'{stem}.key'",
        "server/coordinator/folder.py: coordinator.state_path / f'{command}.lock'",
        "server/deployment/superlink/database.py: path.with_name(DATABASE_FILE + ending)",
        "server/deployment/superlink/database.py: path.with_name(new_name + ending)",
        "server/deployment/superlink/database.py: path.with_name(path.name + ending)",
        "server/deployment/superlink/process.py: self.path.with_name(f'{self.path.name}.{number}')",
        "server/export/preflight.py: folder / ('model.onnx' if export_format is ExportFormat.onnx else 'model.pt')",
        "server/federation/checkpoints.py: self.folder / f'round-{number:06d}.{kind}'",
        "server/reporting/live/page.py: _ASSETS_FOLDER / name",
        "server/runs/audit_log.py: folder / name",
        "server/runs/audit_log.py: self._updates / folder",
        "server/runs/folder.py: path / name",
        "server/runs/folder.py: self.path / name",
        "server/runs/live_status.py: state / f'present-{mark}.json'",
        "server/runs/tracking.py: folder / f'events.out.tfevents.{time.time_ns()}'",
        "server/runs/verify.py: folder / name",
        "server/runs/verify.py: updates / where",
        "server/simulation/export_sites.py: folder / name",
        "studies/benchmark_results.py: _ROOT / folder",
        "studies/cli.py: Path(out, 'events.jsonl')",
        "studies/cli.py: out / f'{variant}.jsonl'",
        "studies/compare.py: out / f'{path.stem}-seed{seed}'",
        "studies/compare.py: out / method",
        "studies/study.py: folder / fill_placeholders(table.experiment)",
        "studies/study.py: out / name",
        "studies/trial.py: self.folder.with_name(f'{self.folder.name}.unfinished')",
    },
    "the one way to join a checked name": {
        "common/system/plain_names.py: folder / f'{name}{ending}'",
    },
    "files of a simulated site, which Ray brings from another node of the researcher's own cluster": {
        "server/simulation/backends/site_files.py: folder / name",
        "server/simulation/backends/site_files.py: folder / path",
        "server/simulation/backends/site_files.py: os.path.join(parent, name)",
        "server/simulation/backends/site_files.py: self.folder / path",
        "server/simulation/backends/site_worker.py: self._folder / FROZEN_FOLDER / name",
    },
}
"""Where the name comes from -> the joins, as ``file: expression``."""
