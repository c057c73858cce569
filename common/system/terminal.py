"""How our three programs end, and how they speak to a person while they run."""

import datetime as dt
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from common import __version__
from common.errors import BadInput, Fault
from common.system.files import NO_PLACE_TO_WRITE, disk_full_message
from common.system.plain_text import indent_following_lines, json_text, terminal_safe
from common.system.resources import raise_descriptor_limit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ProgressForm(StrEnum):
    """What ``--progress`` names: how ``flwr-sim`` shows how far it is."""

    auto = "auto"
    bar = "bar"
    lines = "lines"
    json = "json"
    none = "none"


class LogForm(StrEnum):
    """What ``--log-format`` names: how a program that stays up says what happens."""

    text = "text"
    json = "json"


_log_form = [LogForm.text]


def _log_as(form: LogForm) -> LogForm:
    _log_form[:] = [form]
    return form


def log_form() -> LogForm:
    """Return the form that the present command was asked for; text where it has no such option."""
    return _log_form[0]


LogFormat = Annotated[
    LogForm,
    typer.Option("--log-format", callback=_log_as, help="Of the lines on what happens: text, or an object a line."),
]


Restarted = Annotated[
    bool,
    typer.Option(
        "--wait-on-refusal",
        help="This program is started again whenever it ends, as containers are: after a refusal it waits until a file "
        "of DIR changes, at most 15 min.",
    ),
]


class PlainConsole(Console):
    """A console whose text cannot act on the terminal; only the styles that our own programs ask for do.

    What others say was made harmless where it came in (:mod:`common.system.plain_text`). This is the second line: rich
    lets escape sequences of a text through, in a table, in a progress bar and in a plain line alike. Nor are names
    between colons replaced by pictures.
    """

    def __init__(self, *, file: IO[str] | None = None, **more: Any) -> None:
        super().__init__(file=file, emoji=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, and write out what is not plain in every piece of text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=terminal_safe(segment.text))


def program(name: str, purpose: str, exit_codes: str) -> typer.Typer:
    """Return a program as all three are: commands that teach by example, ``--version``, shell completion.

    Args:
        name: As it is typed.
        purpose: One sentence.
        exit_codes: Code and meaning, comma-separated.
    """
    app = typer.Typer(
        name=name,
        help=purpose,
        epilog=f"Exit codes: {exit_codes}. Each command's own help has an example. No colours with NO_COLOR=1.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        suggest_commands=False,  # click does
        rich_markup_mode="rich",
    )

    def tell_version(wanted: bool) -> None:
        if wanted:
            print(f"{name} {__version__}")
            raise typer.Exit

    @app.callback()
    def about(
        version: Annotated[
            bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Say which release this is.")
        ] = False,
    ) -> None:
        """What goes for every command."""

    return app


class _Lossy(io.FileIO):
    """Standard output or error, written to for as long as that can be: what cannot be written is lost in silence.

    A reader may leave (``| head -1``) or a disk may be full under it, and neither must stop a run of hours.

    Attributes:
        lost: Why something was lost that somebody waits for; None where only the reader has left.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written, and say that it was all."""
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except OSError as error:
            self.lost = self.lost or error
        return memoryview(data).nbytes


def _lossy(stream: Any, descriptor: int) -> Any:
    """Return the stream, where it is the process's own, without errors; one that somebody put in its place stays."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors="replace")  # in a locale without our signs
    try:
        if stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):
        return stream
    buffered = io.BufferedWriter(_Lossy(descriptor))
    at_once, whole_lines = stream.write_through, stream.line_buffering
    return io.TextIOWrapper(buffered, stream.encoding, "replace", line_buffering=whole_lines, write_through=at_once)


@contextmanager
def _lossy_streams(*, prints_result: bool) -> Iterator[None]:
    """Within it no loss of what is printed stops the program; a full disk under its result is said at the end.

    Raises:
        SystemExit: With 1 for a program that ended well and could not print its result.
    """
    before = sys.stdout, sys.stderr
    out, error = sys.stdout, sys.stderr = _lossy(sys.stdout, 1), _lossy(sys.stderr, 2)
    try:
        yield
    except SystemExit as end:
        if prints_result and not end.code and (reason := _lost_of(out)):
            problem, remedy = f"cannot be written: {reason}.", "Free some room there, or send it elsewhere."
            _last_word("error", str(Fault("standard output", problem, remedy)))
            raise SystemExit(1) from None
        raise
    finally:
        for stream in (out, error):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _lost_of(stream: Any) -> str:
    """Return why something of a stream was lost; empty where nothing was."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if not isinstance(raw, _Lossy):
        return ""
    stream.flush()
    return (raw.lost.strerror or "the system refuses it").lower() if raw.lost else ""


def run_program(
    app: typer.Typer,
    arguments: Sequence[str] | None,
    stopped: tuple[type[Exception], ...] = (),
    *,
    prints_result: bool = True,
) -> None:
    """Run a program: faults of the input go to stderr with exit code 2, other ends with their own or 1.

    A reader of its output who leaves changes neither what it does nor its exit code.

    Args:
        stopped: Exceptions whose text explains to a person why the program ends; their ``exit_code`` is taken.
        prints_result: Whether a loss of what it prints, on a full disk, is a failure; not so of a log.
    """
    _log_as(LogForm.text)
    raise_descriptor_limit()
    with _lossy_streams(prints_result=prints_result):
        _run(app, arguments, stopped)


def _run(app: typer.Typer, arguments: Sequence[str] | None, stopped: tuple[type[Exception], ...]) -> None:
    try:
        app(arguments, prog_name=app.info.name)
    except BadInput as error:
        for fault in error.faults:
            _last_word("error", str(fault))
        sys.exit(error.exit_code)
    except OSError as error:
        if full := disk_full_message(error):
            _last_word("stopped", full)
            sys.exit(1)
        if not (isinstance(error.filename, str | bytes) and error.errno in NO_PLACE_TO_WRITE):
            raise
        problem = f"cannot be written: {(error.strerror or 'the system refuses it').lower()}."
        _last_word(
            "error", str(Fault(str(error.filename), problem, "Name another place, or change its owner or mode."))
        )
        sys.exit(BadInput.exit_code)
    except stopped as error:
        _last_word("stopped", str(error))
        sys.exit(int(getattr(error, "exit_code", 1)))


def _last_word(kind: str, text: str) -> None:
    """Why the program ends, on standard error."""
    if log_form() is LogForm.json:
        json_printer(sys.stderr)({"level": "error", "message": terminal_safe(text)})
    else:
        console = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{kind}[/] {escape(text)}")


def event_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints one line an event, with date, time and zone.

    With ``--log-format json`` a line is an object with ``time``, ``level`` and ``message``.

    Lines of a text after its first are indented, so that no words of somebody else look like an event of their own.
    """

    if log_form() is LogForm.json:
        write = json_printer(console.file)
        return lambda text: write({"level": "info", "message": terminal_safe(text)})

    def tell(text: str) -> None:
        console.print(
            f"[dim]{local_timestamp()}[/]  {escape(indent_following_lines(terminal_safe(text)))}",
            soft_wrap=True,
            highlight=False,
        )
        console.file.flush()

    return tell


def progress_form(asked: ProgressForm, console: Console) -> ProgressForm:
    """Return how progress is shown: ``auto`` is a bar on a terminal, and lines elsewhere; a quiet console shows none.

    Raises:
        BadInput: If a bar is asked for where there is no terminal.
    """
    if console.quiet:
        return ProgressForm.none
    # is_terminal alone is what FORCE_COLOR says, which build servers set for a log file
    drawn = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    if asked is ProgressForm.bar and not drawn:
        problem = "needs a terminal that can draw, and standard output is none."
        raise BadInput([Fault("--progress bar", problem, "Use lines, json, or leave it out.")])
    return (ProgressForm.bar if drawn else ProgressForm.lines) if asked is ProgressForm.auto else asked


def json_printer(file: IO[str]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes one JSON object a line, at once; its first field is ``time``."""

    def tell(fields: Mapping[str, Any]) -> None:
        file.write(json_text({"time": local_timestamp(), **fields}) + "\n")
        file.flush()

    return tell


def local_timestamp() -> str:
    """Return the present local time with the zone's offset, ISO 8601 to the second."""
    return dt.datetime.now().astimezone().isoformat(timespec="seconds")
