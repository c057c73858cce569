"""Lines of ``events.jsonl`` as sentences."""

import datetime as dt
from collections.abc import Mapping
from typing import Any

LONGEST = 240
_PHASES = {"evaluate": "evaluation", "train": "training"}

_SENTENCES = {
    "roll_call": "roll call: {sites} take part; classes: {classes}",
    "joined": "{site} joins in round {round}",
    "heavy_site": "{site} says that it has {images} images, {share} of all; participation.largest_share bounds that",
    "no_validation_images": "without validation images: {sites}",
    "stopped": "the run stopped: {reason}",
    "done": "the run is done; model {model_sha256}",
    "begun_anew": "the run began anew",
    "resumed": "the run goes on after round {round}",
    "checkpoint_broken": "checkpoint {file} passed over: {reason}",
    "image_skipped": "an image of the {part} part could not be read and was left out",
}


def told(event: Mapping[str, Any]) -> tuple[str, str]:
    """Time of day and text; an event that has no sentence here is told by its fields."""
    fields = {name: _words(value) for name, value in event.items() if name not in ("time", "event")}
    name = str(event.get("event", "event"))
    sentence = _absent(event) if name == "absent" else _SENTENCES.get(name, "")
    try:
        text = sentence.format(**fields) if sentence else _by_fields(name, fields)
    except (KeyError, IndexError, ValueError):
        text = _by_fields(name, fields)
    return _time_of_day(str(event.get("time", ""))), text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _absent(event: Mapping[str, Any]) -> str:
    phase = event.get("round")
    place = "round {round}" if isinstance(phase, int) else f"the {_PHASES.get(str(phase), '{round}')}"
    return place + " went without {site}: {reason}"


def _by_fields(name: str, fields: Mapping[str, str]) -> str:
    return ", ".join([name.replace("_", " "), *(f"{key} {value}" for key, value in fields.items())])


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _time_of_day(moment: str) -> str:
    try:
        return dt.datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return ""
