"""Lines of ``events.jsonl`` as sentences."""

import datetime as dt
from collections.abc import Mapping
from typing import Any

from server.runs.live_status import PHASES

LONGEST = 240

SENTENCES = {
    "begun": "the run began",
    "begun_anew": "the run began again from round 1: no checkpoint could be read",
    "resumed": "the run was resumed after round {round}",
    "checkpoint_broken": "checkpoint {file} could not be read: {reason}",
    "roll_call": "roll call: {sites} take part; classes: {classes}",
    "heavy_site": "{site} states {images} images, {share:.0%} of all; participation.largest_share can bound its weight",
    "no_validation_images": "without validation images: {sites}",
    "patients_unknown": "the data set does not say which images are of one patient",
    "image_skipped": "image {image} of the {part} part could not be read and was left out: {reason}",
    "other_release": "{site} runs release {release}, the coordinator {coordinator}",
    "joined": "{site} joined in round {round}",
    "absent": "{when} went on without {site}: {reason}",
    "left_out": "{site} was left out in {when}: {reason}",
    "shortened_update": "round {round}: the update of {site} is too long: {done}",
    "plain_mean": "round {round}: plain mean instead of the robust one for {of}",
    "rows_stayed_masked": "round {round}: the head rows of {classes} stayed masked and did not change",
    "condemned": "{site} harmed the model in round {round} and is left out: {reason}",
    "rolled_back": "the model of round {round} was rejected and the run went back to round {to}: {because}",
    "refused_call": "a call of {caller} was refused ({call}): {reason}",
    "tracking_stopped": "MLflow receives no more figures of this run: {reason}",
    "died": "the process of the run {how}",
    "no_receipt": "the receipt could not be written: {reason}",
    "stopped": "the run stopped: {reason}",
    "done": "the run is done; model {model_sha256}",
}
"""Every event that the coordinator and the simulation write, with its sentence."""


def told(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return when it was, with the zone, and the sentence; an event without a sentence is shown by its fields."""
    fields = {
        name: _shown(value) for name, value in event.items() if name not in ("time", "event") and value is not None
    }
    name = str(event.get("event", "event"))
    try:
        text = SENTENCES[name].format(**fields, when=_when(event.get("round")))
    except (KeyError, IndexError, ValueError):  # no sentence, or fields of another release
        text = _by_fields(name, fields)
    return _moment(str(event.get("time", ""))), text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _when(phase: Any) -> str:
    return f"round {phase}" if isinstance(phase, int) else f"the {PHASES.get(str(phase), phase)}"


def _by_fields(name: str, fields: Mapping[str, Any]) -> str:
    return ", ".join([name.replace("_", " "), *(f"{key} {value}" for key, value in fields.items())])


def _shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _moment(text: str) -> str:
    """Return the time of day, or the date and the time where it was not today; empty for what is no time."""
    try:
        moment = dt.datetime.fromisoformat(text).astimezone()
    except ValueError:
        return ""
    today = moment.date() == dt.datetime.now(moment.tzinfo).date()
    return moment.strftime("%H:%M:%S %Z" if today else "%Y-%m-%d %H:%M %Z")
