"""Run an experiment from roll call to summary on any Flower ``Grid``, with simulated or real sites."""

import datetime as dt
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from polyclinic.server.runs.schema import (
    CountingStatistics,
    FinalMethodStatistics,
    LoweredClaim,
    PrivacyBudgetSpent,
    RunPixels,
    RunSummary,
    SiteBenefit,
    SiteSummary,
)
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
    grid: Grid, experiment: Experiment, run_context: RunContext, watchers: Sequence[SilentRunProgress]
) -> dict[str, Any]:
    """Run an experiment over a Grid, and write the run folder; return the summary.

    Args:
        grid: Reaches the sites, in a simulation or over the network.
        run_context: Folder, data, devices and callbacks of the run.
        watchers: Displays that show the progress of the run.

    Raises:
        RunStopped: If too few sites reply, or the coordinator's own training diverges.
        BadInput: If the sites' labels contradict each other, or the method does not fit them.
    """
    start_time = time.monotonic()
    frozen = build_initial_frozen_part(experiment.model, experiment.run.seed, run_context.base)
    model_before = run_context.resumed.experiment["model"] if run_context.resumed else {}
    experiment = add_model_file_hashes(experiment, frozen, run_context.base, model_before)
    if experiment.planning is not None:
        experiment = plan_network_of_run(grid, experiment, run_context, watchers)
    recorder = RunRecorder(experiment, run_context, watchers)
    coordinator = make_coordinator(
        build_experiment_strategy(experiment),
        make_hospital_plan(experiment),
        experiment.participation,
        run_context.run,
        callbacks=recorder,
        registered=run_context.registered,
        claims=run_context.claims,
        processes=run_context.processes,
        storage=UpdateStorage(
            run_context.folder.path,
            MAX_UPDATE_BYTES_IN_MEMORY_OVER_NETWORK if run_context.backend == "network" else None,
        ),
        frozen=frozen,
    )
    classes_before = run_context.resumed.state.model.head.class_names if run_context.resumed else ()
    coordinator.sites.pixels = _read_pixels_before_resume(run_context)
    contract = coordinator.sites.call_roll(grid, run_context.sites, tuple(classes_before))
    while True:
        classes = contract.class_names
        pixels = coordinator.sites.pixels
        run_context.folder.append_event(
            "roll_call",
            sites=list(contract.sites),
            classes=list(classes),
            hash=contract.hash,
            pixels=pixels and pixels.model_dump(mode="json"),
        )
        keeps_norm = coordinator.method.site.parts.keeps_batch_norm_local
        # One hospital alone must not stop the run by adding classes until there are as many as a plug-in's features. So
        # the number is not checked if a class is annotated by one real hospital only.
        has_class_of_one_hospital = run_context.registered is not None and bool(contract.unique_classes)
        count = 0 if has_class_of_one_hospital else len(classes)
        raise_faults(find_plugin_network_faults(experiment.model, count, keeps_norm=keeps_norm))
        network = build_network(experiment.model, classes, experiment.run.seed, run_context.base)
        contract_before = contract
        contract = coordinator.fix_run_model_layout(make_model_layout(network))
        if contract == contract_before:
            break
        # Sites that build a different network were left out, and their classes too. Build a network without them.
    raise_faults(_find_own_pixel_faults(experiment, run_context, coordinator))
    if run_context.external is not None:
        refuse_test_set_without_model_class(run_context.external, contract.class_names)
    if run_context.server_data is not None:
        coordinator.receive_coordinator_images(run_context.server_data, contract.class_names, run_context.device)
    initial = read_model_state(network)
    recorder.record_warm_start(network.warm_start, pixels)
    recorder.begin_run_recording(coordinator, make_model_layout(network), initial)
    if run_context.resumed is None:
        recorder.record_classes_of_one_site(coordinator.sites.ask_about_classes_of_one_site())
    try:
        coordinator.start(grid, make_model_array_record(initial), experiment.run.rounds)
        state = coordinator.state
        if state.round < experiment.run.rounds:
            run_context.folder.append_event("ended_early", round=state.round, best_round=state.best_round)
        if reason := coordinator.reason_for_last_model:
            run_context.folder.append_event("last_model", because=reason)
        recorder.totals.write_pending_round_line(coordinator.last_validation, coordinator.state)
        tested = coordinator.test_result_model(grid)
        sums = unmask_test_histograms(coordinator, select_counting_replies(tested, coordinator))
        tested_classes = sums.keys() | list_tested_classes(tested.accepted.values())
        learning = _find_class_learning(coordinator, run_context, network, tested_classes)
        outcome = save_and_test_model(network, coordinator, tested, run_context, sums, learning)
        benefits = compare_with_local_training(coordinator, initial, tested.accepted, recorder.totals)
    except RunStopped as error:
        recorder.record_run_stop(str(error))
        raise
    summary = _make_run_summary(
        experiment,
        run_context,
        coordinator,
        outcome,
        recorder.totals,
        time.monotonic() - start_time,
        benefits=benefits,
        start=recorder.start,
        learning=learning,
    )
    summary = summary.model_copy(update={"claims": recorder.collect_claims(summary)})
    recorder.record_run_end(summary)
    return summary.to_json_object()


def _read_positives(member: RunMember, run_context: RunContext) -> dict[str, int | None]:
    """Return class -> number of positive training images of a site, None for a hidden number; empty if unknown."""
    answer = member.answer
    counts = dict(zip(answer.class_names, map(unknown_count_to_none, answer.positives), strict=False))
    return counts or dict(run_context.positives.get(answer.site, {}))


def _read_shown_classes(member: RunMember, run_context: RunContext) -> dict[str, bool | None]:
    """Return class -> True if a training image of a site shows the class, None if the site hides it.

    The result is empty if it is not known for the site.
    """
    counts = _read_positives(member, run_context)
    return member.answer.shown_classes or {name: is_shown(count) for name, count in counts.items()}


def _find_class_learning(
    coordinator: Coordinator, run_context: RunContext, network: SplitNetwork, tested_classes: Collection[str]
) -> ClassLearning:
    """Return the classes that the run's global model has not learned; no classes if there is no such model.

    Args:
        tested_classes: Classes with a test result, which shows whether the model has learned them.
    """
    if not coordinator.method.site.parts.has_global_model:
        return ClassLearning()
    contract = coordinator.sites.contract
    members = coordinator.sites.members
    shown_by_site = {site: _read_shown_classes(member, run_context) for site, member in members.items()}
    shown = {
        name: {site: shown_by_site[site].get(name) for site in sorted(shown_by_site) if name in contract.sites[site]}
        for name in contract.class_names
    }
    rounds = select_rounds_of_model(run_context.folder.read_round_lines(), coordinator.round_chosen_by_validation)
    warm = network.warm_start.taken if network.warm_start else ()
    has_own_images = run_context.server_data is not None
    unlearned = find_unlearned_classes(contract.class_names, shown, rounds, warm=warm, has_own_images=has_own_images)
    unknown = find_classes_of_unknown_learning(shown, unlearned, rounds, warm=warm, has_own_images=has_own_images)
    return ClassLearning(unlearned, tuple(name for name in unknown if name not in tested_classes))


def _read_pixels_before_resume(run_context: RunContext) -> PixelForm | None:
    """Return the pixel format on which the sites of a resumed run agreed when it began; None for a new run."""
    if run_context.resumed is None or not run_context.resumed.state.round:
        return None
    events = [event for event in run_context.folder.read_run_events() if event.get("event") == "roll_call"]
    forms = [event["pixels"] for event in events if event.get("pixels")]
    with suppress(ValidationError):  # the file was edited
        return PixelForm.model_validate(forms[-1]) if forms else None
    return None


def _find_own_pixel_faults(experiment: Experiment, run_context: RunContext, coordinator: Coordinator) -> list[Fault]:
    """Return a fault for each setting of the coordinator's own images that makes pixels unlike the hospitals' pixels.

    In a simulation nothing is checked, because all images are the user's own.
    """
    terms = coordinator.sites.pixel_terms
    faults = list[Fault]()
    if run_context.registered is None or terms.begun is None:
        return []
    server_images = None if run_context.server_data is None else run_context.server_data.train
    for table, images in {"server_data": server_images, "external_test": run_context.external}.items():
        if images is not None and len(images):
            shape = images.stored.shape[1:]
            pixel_form = make_pixel_form(getattr(experiment, table), shape, drops_color=images.drops_color)
            faults += find_pixel_faults_of_table(table, pixel_form, terms)
    return faults


def add_model_file_hashes(
    experiment: Experiment,
    frozen: FrozenPart | None,
    base: Path,
    model_before: Mapping[str, Any] = MappingProxyType({}),
) -> Experiment:
    """Return the experiment with hashes of its frozen layers and its weights file, so that sites can compare them.

    Args:
        frozen: Frozen layers of the model; None if it has none.
        base: Folder from which relative paths start.
        model_before: The table ``[model]`` of a resumed run; empty for a new run.

    Raises:
        BadInput: If a hash differs from that in the experiment, or in the run before it was resumed.
    """
    model = experiment.model
    hashes = {}
    if frozen is not None:
        hashes["frozen_sha256"] = frozen.sha256
    if model.weights is not None:
        with open_input_file(find_weights_path(base, model.weights)) as file:
            hashes["weights_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    for key, sha256 in hashes.items():
        expected = getattr(model, key) or model_before.get(key)
        if expected not in (None, sha256):
            problem = f"is {expected}, and this model has {sha256}."
            raise BadInput([Fault(f"model.{key}", problem, "The weights file is another one than was meant.")])
    return experiment.model_copy(update={"model": model.model_copy(update=hashes)})


def _make_run_summary(
    experiment: Experiment,
    setting: RunContext,
    coordinator: Coordinator,
    outcome: FinalTestOutcome,
    totals: RunTotals,
    total: float,
    *,
    benefits: dict[str, SiteBenefit],
    start: Sequence[str],
    learning: ClassLearning,
) -> RunSummary:
    """Return the content of ``summary.json``, without the claims that follow from it.

    Args:
        total: Duration of the run in seconds.
        benefits: Site -> comparison of the run's model with the one that the site trained alone.
        start: Sentences on what the first model takes from a finished run.
        learning: The classes that the model has not learned.
    """
    train, aggregate = totals.train_seconds, totals.aggregate_seconds
    idle = max(total - train - aggregate, 0.0)
    figures = coordinator.method.compute_summary_figures(coordinator.make_final_round_context())
    return RunSummary(
        name=experiment.run.name or experiment.run.method,
        method=experiment.run.method,
        backend=setting.backend,
        ended=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        rounds=coordinator.state.round,
        best_round=coordinator.round_chosen_by_validation,
        last_model_because=coordinator.reason_for_last_model or None,
        criterion=coordinator.state.criterion,
        seed=experiment.run.seed,
        excluded=dict(coordinator.state.excluded),
        left_out=dict(coordinator.sites.left_out_sites),
        absent=tuple(coordinator.sites.absent_sites),
        statistics=_summarize_counting_statistics(coordinator),
        classes=coordinator.sites.contract.class_names,
        sites={
            site: _summarize_site(member, setting, coordinator, totals)
            for site, member in sorted(coordinator.sites.members.items())
        },
        table_sha256=setting.table_sha256,
        patients_known=setting.patients_known,
        skipped_images=tuple(setting.skipped),
        notes=tuple(setting.notes),
        omissions=tuple(setting.omissions),
        reproducible=setting.reproducible,
        test=outcome.test,
        per_site=dict(outcome.per_site),
        drawn_to_test=coordinator.sites_drawn_for_test,
        ensemble=outcome.ensemble,
        external=outcome.external,
        learned=FinalMethodStatistics.model_validate(figures),
        privacy=_summarize_privacy(experiment, coordinator, totals),
        client_accuracy=find_best_client_accuracies(totals.tallies),
        seconds={"total": total, "train": train, "aggregate": aggregate, "idle": idle},
        model_sha256=outcome.model_sha256,
        contract_hash=coordinator.sites.contract.hash,
        pixels=RunPixels(form=coordinator.sites.pixels, unknown=tuple(coordinator.sites.sites_without_stated_pixels)),
        classes_of_one_site=dict(coordinator.sites.classes_of_one_site),
        versions=collect_software_versions(),
        wire=WIRE_VERSION,
        experiment=experiment.model_dump(mode="json"),
        benefit=benefits,
        start=tuple(start),
        unlearned=dict(learning.unlearned),
        maybe_unlearned=tuple(learning.unknown),
    )


def _summarize_site(member: RunMember, setting: RunContext, coordinator: Coordinator, totals: RunTotals) -> SiteSummary:
    answer, site = member.answer, member.answer.site
    return SiteSummary(
        classes=coordinator.sites.contract.sites[site],
        train_samples=answer.train_samples,
        validation_samples=unknown_count_to_none(answer.validation_samples),
        positives=_read_positives(member, setting),
        smallest_count=answer.smallest_count,
        level=answer.level,
        release=answer.release,
        wire=member.wire,
        bytes_up=coordinator.sites.bytes_up[site],
        bytes_down=coordinator.sites.bytes_down[site],
        seconds=totals.site_seconds[site],
        epochs=totals.epochs[site],
        arithmetic=totals.arithmetic.get(site, ""),
    )


def _summarize_counting_statistics(coordinator: Coordinator) -> CountingStatistics:
    """Return the summary's entry on the sites whose statistics count at the end, and on claims that were lowered."""
    uncounted, answers = coordinator.uncounted_sites, coordinator.sites.answers
    lowered = coordinator.sites.lower_image_claims(uncounted)
    return CountingStatistics(
        counted=tuple(site for site in answers if site not in uncounted),
        uncounted=dict(uncounted),
        lowered={
            site: LoweredClaim(claimed=answers[site].train_samples, counted=images) for site, images in lowered.items()
        },
    )


def _summarize_privacy(
    experiment: Experiment, coordinator: Coordinator, totals: RunTotals
) -> PrivacyBudgetSpent | None:
    """Return the summary's entry on privacy, with the epsilon of each site that trained; None without privacy."""
    section = experiment.privacy
    if section.level == "none":
        return None
    epsilon = {site: totals.epsilon.get(site) for site in sorted(coordinator.sites.members) if totals.epochs[site]}
    cost = PrivacyBudgetSpent(level=section.level, delta=section.delta, accountant=section.accountant, epsilon=epsilon)
    if section.noise == "local":
        return cost
    protection = make_site_privacy_settings(coordinator.plan, coordinator.method.site, 1)
    assert protection is not None, "it has noise"
    round_alone = protection.noisy_steps_with_honest_sites(1)
    alone = replace(round_alone, count=round_alone.count * coordinator.plan.run.rounds)
    of_one = compute_epsilon([alone], section.delta, section.accountant)
    of_shares = {"noise": section.noise, "honest_sites": section.honest_sites, "epsilon_of_one_share": of_one}
    return cost.model_copy(update=of_shares)
