"""The command line of our three programs: options, output, progress, exit codes and error messages."""

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
from rich.table import Table

from polyclinic.common import __version__
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import UNWRITABLE_PLACE_ERRORS, make_disk_full_message
from polyclinic.common.system.plain_text import HANGING_INDENT, escape_for_terminal, format_as_json_text
from polyclinic.common.system.resources import raise_descriptor_limit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ProgressFormat(StrEnum):
    """The values of the option ``--progress`` of ``flwr-sim``."""

    auto = "auto"
    bar = "bar"
    lines = "lines"
    json = "json"
    none = "none"


class LogOutputFormat(StrEnum):
    """The values of the option ``--log-format``."""

    text = "text"
    json = "json"


_log_format = [LogOutputFormat.text]


def _set_log_format(form: LogOutputFormat) -> LogOutputFormat:
    _log_format[:] = [form]
    return form


def get_log_format() -> LogOutputFormat:
    """Return the value of ``--log-format`` in this process; text if the command has no such option."""
    return _log_format[0]


LogFormat = Annotated[
    LogOutputFormat,
    typer.Option(
        "--log-format", callback=_set_log_format, help="Of the lines on what happens: text, or an object a line."
    ),
]


WaitOnRefusal = Annotated[
    bool,
    typer.Option(
        "--wait-on-refusal",
        help="This program is started again whenever it ends, as containers are: after a refusal it waits until a file "
        "of DIR changes, and starts again by itself; it ends after 15 min without a change.",
    ),
]


class EscapingConsole(Console):
    """A rich console that escapes control characters in every text, and does not replace ``:name:`` by emojis."""

    def __init__(self, *, file: IO[str] | None = None, **more: Any) -> None:
        super().__init__(file=file, emoji=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like rich, then escape the text of every segment."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_for_terminal(segment.text))


def make_command_line_program(name: str, purpose: str, exit_codes: str) -> typer.Typer:
    """Return a new typer application with ``--version`` and shell completion, to which commands can be added.

    Args:
        name: Name of the program.
        purpose: Help text of the program.
        exit_codes: Exit codes with their meanings, comma-separated, for the help text.
    """
    app = typer.Typer(
        name=name,
        help=purpose,
        epilog=f"Exit codes: {exit_codes}. Each command's own help has an example. No colours with NO_COLOR=1.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        suggest_commands=False,  # click already suggests commands
        rich_markup_mode="rich",
    )

    def print_version(is_set: bool) -> None:
        if is_set:
            print(f"{name} {__version__}")
            raise typer.Exit

    @app.callback()
    def accept_version_option(
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Say which release this is.")
        ] = False,
    ) -> None:
        """Take the option of the program itself, ``--version``."""

    return app


class _NeverFailingStream(io.FileIO):
    """Raw stream for standard output or error that drops output which it cannot write, instead of raising an error.

    A closed pipe (``| head -1``) or a full disk must not stop a run of hours.

    Attributes:
        lost: The first error except a closed pipe, such as a full disk; None if there was none.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write data; after an error drop the data and report them as written."""
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except OSError as error:
            self.lost = self.lost or error
        return memoryview(data).nbytes


def _make_stream_safe(stream: Any, descriptor: int) -> Any:
    """Wrap standard output or error so that writing never fails; return any other stream unchanged."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors="replace")  # the locale may lack some of our characters
    try:
        if stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):
        return stream
    buffered = io.BufferedWriter(_NeverFailingStream(descriptor))
    at_once = stream.write_through
    whole_lines = stream.line_buffering
    return io.TextIOWrapper(buffered, stream.encoding, "replace", line_buffering=whole_lines, write_through=at_once)


@contextmanager
def _drop_unwritable_output(*, prints_result: bool) -> Iterator[None]:
    """Drop output that cannot be written inside the ``with`` block, instead of raising an error.

    Args:
        prints_result: True if lost output is a failure, which is reported at the end; False for a log.

    Raises:
        SystemExit: With code 1, if the program succeeded but could not print its result.
    """
    before = sys.stdout, sys.stderr
    out = _make_stream_safe(sys.stdout, 1)
    error = _make_stream_safe(sys.stderr, 2)
    sys.stdout = out
    sys.stderr = error
    try:
        yield
    except SystemExit as end:
        raw = getattr(getattr(out, "buffer", None), "raw", None)
        if not prints_result or end.code or not isinstance(raw, _NeverFailingStream):
            raise
        out.flush()
        if raw.lost is None:
            raise
        problem = f"cannot be written: {(raw.lost.strerror or 'the system refuses it').lower()}."
        remedy = "Free some room there, or send it elsewhere."
        _print_error("error", str(Fault("standard output", problem, remedy)))
        raise SystemExit(1) from None
    finally:
        for stream in (out, error):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def run_command_line_program(
    app: typer.Typer,
    arguments: Sequence[str] | None,
    stopped: tuple[type[Exception], ...] = (),
    *,
    prints_result: bool = True,
) -> None:
    """Run a command-line program; print expected errors as messages for a person, and exit with the error's code.

    A closed pipe at standard output changes neither the work nor the exit code.

    Args:
        app: The program.
        arguments: The command line after the program's name; None for that of this process.
        stopped: Further exception types with messages for a person. The exit code is the exception's attribute
            ``exit_code``, or 1 if it has none.
        prints_result: True if output that is lost on a full disk is a failure; False for a log.
    """
    _set_log_format(LogOutputFormat.text)
    raise_descriptor_limit()
    with _drop_unwritable_output(prints_result=prints_result):
        try:
            app(arguments, prog_name=app.info.name)
        except BadInput as error:
            for fault in error.faults:
                _print_error("error", str(fault))
            sys.exit(error.exit_code)
        except OSError as error:
            if full := make_disk_full_message(error):
                _print_error("stopped", full)
                sys.exit(1)
            if not (isinstance(error.filename, str | bytes) and error.errno in UNWRITABLE_PLACE_ERRORS):
                raise
            problem = f"cannot be written: {(error.strerror or 'the system refuses it').lower()}."
            fault = Fault(str(error.filename), problem, "Name another place, or change its owner or mode.")
            _print_error("error", str(fault))
            sys.exit(BadInput.exit_code)
        except stopped as error:
            _print_error("stopped", str(error))
            sys.exit(int(getattr(error, "exit_code", 1)))


def _print_error(kind: str, text: str) -> None:
    """Print on standard error why the program ends, in the format of ``--log-format``."""
    if get_log_format() is LogOutputFormat.json:
        make_json_printer(sys.stderr)({"level": "error", "message": escape_for_terminal(text)})
    else:
        console = EscapingConsole(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{kind}[/] {escape(text)}")


def make_name_override(name: str) -> list[str]:
    """Return the override of ``run.name`` for an option ``--name``; empty without a name."""
    return [f"run.name={format_as_json_text(name)}"] if name else []


def make_event_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a log line for an event, with date, time and time zone.

    With ``--log-format json`` a line is an object with ``time``, ``level`` and ``message``. Further lines of a text are
    indented, so that untrusted text cannot imitate an event.
    """
    if get_log_format() is LogOutputFormat.json:
        write = make_json_printer(console.file)
        return lambda text: write({"level": "info", "message": escape_for_terminal(text)})

    def print_event(text: str) -> None:
        first, *others = escape_for_terminal(text).split("\n")
        lines = "\n".join(
            [first, *(line if line.startswith(HANGING_INDENT) else f"{HANGING_INDENT}{line}" for line in others)]
        )
        console.print(f"[dim]{make_local_timestamp()}[/]  {escape(lines)}", soft_wrap=True, highlight=False)
        console.file.flush()

    return print_event


def fold_long_words(table: Table) -> Table:
    """Make all columns of a table break words that are too long, which rich would cut; return the table."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def choose_progress_format(requested: ProgressFormat, console: Console) -> ProgressFormat:
    """Return the progress display for a requested ``--progress`` value and a console.

    ``auto`` becomes ``bar`` on a terminal, and ``lines`` otherwise. A quiet console has no progress display.

    Raises:
        BadInput: If ``bar`` is requested without a terminal.
    """
    if console.quiet:
        return ProgressFormat.none
    # Check isatty, too: is_terminal is also True with FORCE_COLOR, which build servers set for a log file.
    can_draw = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    if requested is ProgressFormat.bar and not can_draw:
        problem = "needs a terminal that can draw, and standard output is none."
        raise BadInput([Fault("--progress bar", problem, "Use lines, json, or leave it out.")])
    if requested is not ProgressFormat.auto:
        return requested
    return ProgressFormat.bar if can_draw else ProgressFormat.lines


def make_json_printer(file: IO[str]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes a mapping, with ``time`` as its first field, to a file as one line of JSON."""

    def print_json_line(fields: Mapping[str, Any]) -> None:
        file.write(format_as_json_text({"time": make_local_timestamp(), **fields}) + "\n")
        file.flush()

    return print_json_line


def make_local_timestamp() -> str:
    """Return the local time in ISO 8601 to the second, with the time zone's offset."""
    return dt.datetime.now().astimezone().isoformat(timespec="seconds")
