"""Run an experiment from roll call to summary on any Flower ``Grid``, with simulated or real sites."""

import datetime as dt
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flwr.serverapp import Grid
from pydantic import ValidationError

from polyclinic.common.config import Experiment, make_hospital_plan
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.metrics.multi_class import find_best_client_accuracies
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import FrozenPart, build_initial_frozen_part, make_model_layout, read_model_state
from polyclinic.common.models.weights import find_weights_path
from polyclinic.common.models.zoo.registry import find_plugin_network_faults
from polyclinic.common.pixel_contract import find_pixel_faults_of_table
from polyclinic.common.system.files import open_input_file
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.data.base.pixel_form import PixelForm, make_pixel_form
from polyclinic.data.load import refuse_test_set_without_model_class
from polyclinic.server.federation.benefit import compare_with_local_training
from polyclinic.server.federation.evaluation import (
    FinalTestOutcome,
    RunContext,
    list_tested_classes,
    save_and_test_model,
    select_counting_replies,
    unknown_count_to_none,
)
from polyclinic.server.federation.planning import plan_network_of_run
from polyclinic.server.federation.recorder import RunRecorder, RunTotals, collect_software_versions
from polyclinic.server.runs.progress import SilentRunProgress
from polyclinic.server.runs.unlearned import (
    ClassLearning,
    find_classes_of_unknown_learning,
    find_unlearned_classes,
    is_shown,
    select_rounds_of_model,
)
from polyclinic.strategies.engine.aggregator import MAX_UPDATE_BYTES_IN_MEMORY_OVER_NETWORK, UpdateStorage
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import RunStopped
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.secure_aggregation import unmask_test_histograms
from polyclinic.strategies.engine.sequential import make_coordinator
from polyclinic.strategies.engine.state import make_model_array_record
from polyclinic.strategies.privacy.mechanism import compute_epsilon, make_site_privacy_settings
from polyclinic.strategies.registry import build_experiment_strategy


def run_federation(
    grid: Grid, experiment: Experiment, setting: RunContext, watchers: Sequence[SilentRunProgress]
) -> dict[str, Any]:
    """Run an experiment over ``grid`` and write the run folder; return the summary.

    Args:
        watchers: Displays that show the progress of the run.

    Raises:
        RunStopped: If too few sites reply, or the coordinator's own training diverges.
        BadInput: If the sites' labels contradict each other, or the method does not fit them.
    """
    began = time.monotonic()
    frozen = build_initial_frozen_part(experiment.model, experiment.run.seed, setting.base)
    begun = setting.resumed.experiment["model"] if setting.resumed else {}
    experiment = add_model_file_hashes(experiment, frozen, setting.base, begun)
    if experiment.planning is not None:
        experiment = plan_network_of_run(grid, experiment, setting, watchers)
    recorder = RunRecorder(experiment, setting, watchers)
    coordinator = make_coordinator(
        build_experiment_strategy(experiment),
        make_hospital_plan(experiment),
        experiment.participation,
        setting.run,
        callbacks=recorder,
        registered=setting.registered,
        claims=setting.claims,
        processes=setting.processes,
        storage=UpdateStorage(
            setting.folder.path, MAX_UPDATE_BYTES_IN_MEMORY_OVER_NETWORK if setting.backend == "network" else None
        ),
        frozen=frozen,
    )
    begun_classes = setting.resumed.state.model.head.class_names if setting.resumed else ()
    coordinator.sites.pixels = _read_begun_pixels(setting)
    contract = coordinator.sites.call_roll(grid, setting.sites, tuple(begun_classes))
    while True:
        classes = contract.class_names
        pixels = coordinator.sites.pixels
        setting.folder.append_event(
            "roll_call",
            sites=list(contract.sites),
            classes=list(classes),
            hash=contract.hash,
            pixels=pixels and pixels.model_dump(mode="json"),
        )
        keeps_norm = coordinator.method.site.keeps_batch_norm_local
        # A hospital that adds classes until there are as many as a plug-in's features must not stop the run.
        is_one_hospitals_word = setting.registered is not None and bool(contract.unique_classes)
        count = 0 if is_one_hospitals_word else len(classes)
        raise_faults(find_plugin_network_faults(experiment.model, count, keeps_norm=keeps_norm))
        network = build_network(experiment.model, classes, experiment.run.seed, setting.base)
        before, contract = contract, coordinator.fix_run_model_layout(make_model_layout(network))
        if contract == before:
            break
        # Sites that build another network were left out, and their classes with them: build anew.
    raise_faults(_find_own_pixel_faults(experiment, setting, coordinator))
    if setting.external is not None:
        refuse_test_set_without_model_class(setting.external, contract.class_names)
    if setting.own is not None:
        coordinator.receive_coordinator_images(setting.own, contract.class_names, setting.device)
    initial = read_model_state(network)
    recorder.record_warm_start(network.warm_start, pixels)
    recorder.begin_run_recording(coordinator, make_model_layout(network), initial)
    if setting.resumed is None:
        recorder.record_classes_of_one_site(coordinator.sites.ask_about_classes_of_one_site())
    try:
        coordinator.start(grid, make_model_array_record(initial), experiment.run.rounds)
        state = coordinator.state
        if state.round < experiment.run.rounds:
            setting.folder.append_event("ended_early", round=state.round, best_round=state.best_round)
        if because := coordinator.reason_for_last_model:
            setting.folder.append_event("last_model", because=because)
        recorder.totals.write_pending_round_line(coordinator.last_validation, coordinator.state)
        tested = coordinator.test_result_model(grid)
        sums = unmask_test_histograms(coordinator, select_counting_replies(tested, coordinator))
        tested_classes = sums.keys() | list_tested_classes(tested.accepted.values())
        learning = _find_class_learning(coordinator, setting, network, tested_classes)
        outcome = save_and_test_model(network, coordinator, tested, setting, sums, learning)
        benefits = compare_with_local_training(coordinator, initial, tested.accepted, recorder.totals)
    except RunStopped as error:
        recorder.record_run_stop(str(error))
        raise
    summary = _make_run_summary(experiment, setting, coordinator, outcome, recorder.totals, time.monotonic() - began)
    summary["benefit"] = benefits
    summary["start"] = recorder.start
    summary["unlearned"] = learning.unlearned
    summary["maybe_unlearned"] = learning.unknown
    summary["claims"] = recorder.collect_claims(summary)
    recorder.record_run_end(summary)
    return summary


def _read_positives(member: RunMember, setting: RunContext) -> dict[str, int | None]:
    """Return class -> number of positive training images of a site, None if it hides the number; empty if unknown."""
    answer = member.answer
    counts = dict(zip(answer.class_names, map(unknown_count_to_none, answer.positives), strict=False))
    return counts or dict(setting.positives.get(answer.site, {}))


def _read_shown_classes(member: RunMember, setting: RunContext) -> dict[str, bool | None]:
    """Return class -> whether a training image of a site shows it, None if the site hides that; empty if unknown."""
    counts = _read_positives(member, setting)
    return member.answer.shown_classes or {name: is_shown(count) for name, count in counts.items()}


def _find_class_learning(
    coordinator: Coordinator, setting: RunContext, network: SplitNetwork, tested_classes: Collection[str]
) -> ClassLearning:
    """Return which classes the run's global model has not learned; none if there is no such model.

    Args:
        tested_classes: Classes with a test result, which shows whether the model has learned them.
    """
    if not coordinator.method.site.has_global_model:
        return ClassLearning()
    contract, members = coordinator.sites.contract, coordinator.sites.members
    of_site = {site: _read_shown_classes(member, setting) for site, member in members.items()}
    shown = {
        name: {site: of_site[site].get(name) for site in sorted(of_site) if name in contract.sites[site]}
        for name in contract.class_names
    }
    rounds = select_rounds_of_model(setting.folder.read_round_lines(), coordinator.round_chosen_by_validation)
    warm = network.warm_start.taken if network.warm_start else ()
    has_own_images = setting.own is not None
    unlearned = find_unlearned_classes(contract.class_names, shown, rounds, warm=warm, has_own_images=has_own_images)
    unknown = find_classes_of_unknown_learning(shown, unlearned, rounds, warm=warm, has_own_images=has_own_images)
    return ClassLearning(unlearned, tuple(name for name in unknown if name not in tested_classes))


def _read_begun_pixels(setting: RunContext) -> PixelForm | None:
    """Return the form of pixels on which the sites of a run that is resumed agreed; None for a new run."""
    if setting.resumed is None or not setting.resumed.state.round:
        return None
    events = [event for event in setting.folder.read_run_events() if event.get("event") == "roll_call"]
    forms = [event["pixels"] for event in events if event.get("pixels")]
    with suppress(ValidationError):  # a file that was edited
        return PixelForm.model_validate(forms[-1]) if forms else None
    return None


def _find_own_pixel_faults(experiment: Experiment, setting: RunContext, coordinator: Coordinator) -> list[Fault]:
    """Return a fault for each key by which the coordinator reads its own images otherwise than the hospitals theirs.

    A simulation has none: its images are the user's own, and stay as in earlier releases.
    """
    terms, faults = coordinator.sites.pixel_terms, list[Fault]()
    if setting.registered is None or terms.begun is None:
        return []
    server_images = None if setting.own is None else setting.own.train
    for table, images in {"server_data": server_images, "external_test": setting.external}.items():
        if images is not None and len(images):
            shape, drops_color = images.stored.shape[1:], images.drops_color
            form = make_pixel_form(getattr(experiment, table), shape, drops_color=drops_color)
            faults += find_pixel_faults_of_table(table, form, terms)
    return faults


def add_model_file_hashes(
    experiment: Experiment, frozen: FrozenPart | None, base: Path, begun: Mapping[str, Any] = MappingProxyType({})
) -> Experiment:
    """Return the experiment with hashes of its frozen layers and its weights file, so that sites can compare them.

    Args:
        base: Folder in which relative paths start.
        begun: The table ``[model]`` of the run that is resumed; empty for a new run.

    Raises:
        BadInput: If the hashes are others than the experiment names, or than those of the run that is resumed.
    """
    model, named = experiment.model, {}
    if frozen is not None:
        named["frozen_sha256"] = frozen.sha256
    if model.weights is not None:
        with open_input_file(find_weights_path(base, model.weights)) as file:
            named["weights_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    for key, sha256 in named.items():
        expected = getattr(model, key) or begun.get(key)
        if expected not in (None, sha256):
            problem = f"is {expected}, and this model has {sha256}."
            raise BadInput([Fault(f"model.{key}", problem, "The weights file is another one than was meant.")])
    return experiment.model_copy(update={"model": model.model_copy(update=named)})


def _make_run_summary(
    experiment: Experiment,
    setting: RunContext,
    coordinator: Coordinator,
    outcome: FinalTestOutcome,
    totals: RunTotals,
    total: float,
) -> dict[str, Any]:
    """Return the content of ``summary.json``."""
    accuracy = find_best_client_accuracies(totals.tallies)
    train, aggregate = totals.train_seconds, totals.aggregate_seconds
    idle = max(total - train - aggregate, 0.0)
    return {
        "name": experiment.run.name or experiment.run.method,
        "method": experiment.run.method,
        "backend": setting.backend,
        "ended": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "rounds": coordinator.state.round,
        "best_round": coordinator.round_chosen_by_validation,
        "last_model_because": coordinator.reason_for_last_model or None,
        "criterion": coordinator.state.criterion,
        "seed": experiment.run.seed,
        "excluded": dict(coordinator.state.excluded),
        "left_out": coordinator.sites.left_out_sites,
        "absent": list(coordinator.sites.absent_sites),
        "statistics": _summarize_counting_statistics(coordinator),
        "classes": list(coordinator.sites.contract.class_names),
        "sites": {
            site: {
                "classes": list(coordinator.sites.contract.sites[site]),
                "train_samples": member.answer.train_samples,
                "validation_samples": unknown_count_to_none(member.answer.validation_samples),
                "positives": _read_positives(member, setting),
                "smallest_count": member.answer.smallest_count,
                "level": member.answer.level,
                "release": member.answer.release,
                "wire": member.wire,
                "bytes_up": coordinator.sites.bytes_up[site],
                "bytes_down": coordinator.sites.bytes_down[site],
                "seconds": totals.site_seconds[site],
                "epochs": totals.epochs[site],
                "arithmetic": totals.arithmetic.get(site, ""),
            }
            for site, member in sorted(coordinator.sites.members.items())
        },
        "table_sha256": setting.table_sha256,
        "patients_known": setting.patients_known,
        "skipped_images": [asdict(skip) for skip in setting.skipped],
        "notes": list(setting.notes),
        "omissions": list(setting.omissions),
        "reproducible": setting.reproducible,
        "test": asdict(outcome.test),
        "per_site": dict(outcome.per_site),
        "drawn_to_test": coordinator.sites_drawn_for_test,
        "ensemble": outcome.ensemble,
        "external": outcome.external and asdict(outcome.external),
        "learned": dict(coordinator.method.compute_summary_figures(coordinator.make_final_round_context())),
        "privacy": _summarize_privacy(experiment, coordinator, totals),
        "client_accuracy": accuracy and asdict(accuracy),
        "seconds": {"total": total, "train": train, "aggregate": aggregate, "idle": idle},
        "model_sha256": outcome.model_sha256,
        "contract_hash": coordinator.sites.contract.hash,
        "pixels": _summarize_pixels(coordinator),
        "classes_of_one_site": coordinator.sites.classes_of_one_site,
        "versions": collect_software_versions(),
        "wire": WIRE_VERSION,
        "experiment": experiment.model_dump(mode="json"),
    }


def _summarize_pixels(coordinator: Coordinator) -> dict[str, Any]:
    """Return the summary's entry on pixels: the form that all sites have, and the sites that do not state theirs."""
    form = coordinator.sites.pixels
    unknown = list(coordinator.sites.sites_without_stated_pixels)
    return {"form": form and form.model_dump(mode="json"), "unknown": unknown}


def _summarize_counting_statistics(coordinator: Coordinator) -> dict[str, Any]:
    """Return the summary's entry on the sites whose statistics count at the end, and on claims that were lowered."""
    uncounted, answers = coordinator.uncounted_sites, coordinator.sites.answers
    lowered = coordinator.sites.lower_image_claims(uncounted)
    return {
        "counted": [site for site in answers if site not in uncounted],
        "uncounted": uncounted,
        "lowered": {
            site: {"claimed": answers[site].train_samples, "counted": images} for site, images in lowered.items()
        },
    }


def _summarize_privacy(experiment: Experiment, coordinator: Coordinator, totals: RunTotals) -> dict[str, Any] | None:
    """Return the summary's entry on privacy, with the epsilon of each site that trained; None without privacy."""
    section = experiment.privacy
    if section.level == "none":
        return None
    epsilon = {site: totals.epsilon.get(site) for site in sorted(coordinator.sites.members) if totals.epochs[site]}
    cost = {"level": section.level, "delta": section.delta, "accountant": section.accountant, "epsilon": epsilon}
    if section.noise == "local":
        return cost
    protection = make_site_privacy_settings(coordinator.plan, coordinator.method.site, 1)
    assert protection is not None, "it has noise"
    round_alone = protection.noisy_steps_with_honest_sites(1)
    alone = replace(round_alone, count=round_alone.count * coordinator.plan.run.rounds)
    of_one = compute_epsilon([alone], section.delta, section.accountant)
    return {**cost, "noise": section.noise, "honest_sites": section.honest_sites, "epsilon_of_one_share": of_one}
