"""The command line: one file per command, each with HELP, `add_arguments` and `run`. `--help` loads neither torch nor numpy.

EXIT_CODES lists the exit codes, `docs/exit-codes.md` those of each command. stdout gets only the result; progress and logs go to stderr.
"""

import argparse
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from keyword import iskeyword
from typing import Any, Final

from cachestore import __version__
from cachestore.cli.terminal.folding import folded

COMMANDS: Final = (
    *("precompute", "status", "verify", "repair", "stats", "ls", "show", "report", "why"),
    *("gc", "compact", "drop", "forget", "relocate", "doctor", "bench", "import", "export", "push", "pull", "cache", "live"),
)
_VERBS: Final = ("cache", "encode", "make", "prepare", "preprocess", "run", "train")
"""Commands that do not exist, or do something else, and that `precompute` may be meant by."""
_DATA_IS_AN_OPTION: Final = ("import", "doctor")
HIDDEN: Final = ("work",)
"""Commands that `precompute` starts itself. `--help` and messages do not list them."""
PROGRESS: Final = ("auto", "bar", "plain", "none")
PROGRESS_HELP: Final = "show a bar, a line every 30 s, or none (default: auto, a bar on a terminal)"
"""The choices of `--progress`, and its help text."""

_NEAR: Final = 3
_MAX_COMPARED: Final = 1000

OK: Final = 0
ERROR: Final = 1
USAGE: Final = 2
FAILURES: Final = 3
DAMAGE: Final = 4
SUPERSEDED: Final = 5
NO_STORE: Final = 10
EXIT_CODES: Final = """exit codes:
  0         complete
  1         an error, in one line on stderr
  2         a wrong command line, a source with nothing to encode, or a model
            that --strict refuses
  3         finished, but some samples or files failed: each is listed with its
            reason
  4         damaged or missing values: each is listed with what to run
  5         another run replaced the data set during this one; run the command
            again: nothing is encoded twice
  10        there is no store at that path
  130, 143  stopped by SIGINT or SIGTERM: run the same command again to continue
            (129, 138, 140, 152: by SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU; it is
            128 and the signal's number)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error of cachestore is one line on stderr, with `--json` also an object on stdout."""
    from cachestore.core.errors import CacheStoreError, Incomplete, naming_extras
    from cachestore.core.spelling import for_command_line
    from cachestore.core.words import did_you_mean

    given = _with_hyphens(sys.argv[1:] if arguments is None else arguments)
    names = HIDDEN if given and given[0] in HIDDEN else COMMANDS
    parser = make_parser(names, spelled={*given} & {*names})
    if given and not given[0].startswith("-") and given[0] not in names:
        choices = f"{did_you_mean(given[0], names)} (choose from {', '.join(names)})"
        parser.error(f"argument COMMAND: invalid choice: {given[0]!r}{choices}{_line_to_copy(given)}")
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        meant = f"{_meant_option(unknown, parsed.command)}{_line_to_copy(given)}".replace("?. ", "? ")
        if parsed.command == "live" and not parsed.command_after:
            meant = "; the trainer's command stands after --: cachestore live TRAINER --store STORE -- COMMAND…"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    parsed.line = given
    data = "--data" if parsed.command in _DATA_IS_AN_OPTION else "DATA"
    try:
        with nullcontext() if parsed.command in HIDDEN else for_command_line(data), naming_extras():
            return _run_command(parsed)
    except BrokenPipeError:
        # The reader of our output has ended (`| head`). Python would report it again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (CacheStoreError, OSError) as error:  # OSError: the system refused to read; it names the path
        return _failed(error, parsed)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):  # what Python says if there is no memory for one
            raise
        return _failed(
            Incomplete("there is too little memory for this: free some (see `ulimit -v`), then run the same command again"), parsed
        )


def _failed(error: Exception, parsed: argparse.Namespace) -> int:
    from cachestore.core.errors import BadUsage, StoreNotFound, Superseded

    if parsed.command == "work":  # the process that started it prints the error
        print_json({"error": str(error), "kind": type(error).__name__, "option": getattr(error, "option", "")})
    else:
        print_error(error, as_json=getattr(parsed, "json", False))
    codes = {BadUsage: USAGE, StoreNotFound: NO_STORE, Superseded: SUPERSEDED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), ERROR)


def _run_command(parsed: argparse.Namespace) -> int:
    """Run a command. A signal interrupts it, unless the command takes signals itself."""
    from cachestore.cli.terminal.stopping import in_shell, interrupting, to_stderr

    command: Any = _module_of(parsed.command)
    with interrupting() as stop:
        try:
            return int(command.run(parsed))
        except KeyboardInterrupt:
            if parsed.command not in HIDDEN:
                to_stderr(f"cachestore: stopped; what was done stays. Run it again with: {in_shell(parsed.line)}")
            return 128 + (stop.signal or signal.SIGINT)


def _meant_option(unknown: Sequence[str], command: str) -> str:
    """Return which options of a command may have been meant by the first unknown one, as the end of a sentence."""
    from cachestore.cli.terminal.meant import DATA, OTHER_NAMES, has_answer
    from cachestore.core.words import nearest

    option = next((one.partition("=")[0] for one in unknown if one.startswith("--")), "")
    parser = argparse.ArgumentParser()
    _module_of(command).add_arguments(parser)
    name, known = option[2:], re.findall(r"(?<![\w-])--([a-z][a-z-]*)", parser.format_help())
    if has_answer(name) and command == "precompute":
        return ""
    other = OTHER_NAMES.get(name, "")
    if other == DATA and "--model" in parser.format_help():
        return f"; {option} is {DATA}, the first argument"
    meant = other if other in known else nearest(name, known)
    return "" if meant is None else f"; did you mean '--{meant}'?"


def _line_to_copy(given: Sequence[str]) -> str:
    """Return the end of a usage error: the `precompute` that was meant, if that is certain, maybe by another verb or by DATA alone."""
    from cachestore.cli.terminal.meant import to_copy

    if given[0] in HIDDEN or not (given[0] == "precompute" or any(word.startswith("--model") for word in given)):
        return ""
    is_known = given[0] in COMMANDS
    return to_copy(given if is_known or given[0] in _VERBS else ["precompute", *given], is_certain=not is_known)


class _Help(argparse.HelpFormatter):
    """Breaks lines between words only, never inside an option; a text of several lines stays as it is."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else "\n".join(f"{indent}{line}" for line in self._split_lines(text, width))


class _Parser(argparse.ArgumentParser):
    """Prints help and errors in lines that fit a terminal. STORE, NAME and SAMPLE may stand between options; several DATA may not."""

    _is_intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse a command's options first, then the rest: `show STORE --name N SAMPLE` would lose SAMPLE else, before Python 3.12.

        What stands after `--` is another program's command for a command that has `command_after`.
        """
        if args is not None and "--" in args and self.get_default("command_after") is not None:
            cut = list(args).index("--")
            parsed, unknown = self.parse_known_args(args[:cut], namespace)
            parsed.command_after = list(args[cut + 1 :])
            return parsed, unknown
        takes_several = any(one.nargs in {"*", "+"} for one in self._actions if not one.option_strings)
        if self._is_intermixed or self._subparsers is not None or takes_several:
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(folded(message, file), file)


def make_parser(names: Sequence[str] = COMMANDS, *, spelled: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of some commands. Only those in `spelled` get their arguments, as these take time to load."""
    parser = _Parser(
        prog="cachestore",
        description="A store for the text embeddings and VAE latents of diffusion training.",
        epilog=EXIT_CODES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cachestore {__version__}", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        command: Any = _module_of(name)
        added = commands.add_parser(name, help=command.HELP, description=command.HELP, formatter_class=_Help, allow_abbrev=False)
        if name in spelled:
            command.add_arguments(added)
    return parser


def _module_of(command: str) -> Any:
    """Return a command's module. If the command is a Python keyword, the module's name ends with an underscore."""
    name = command.replace("-", "_")
    return import_module(f"cachestore.cli.{name}{'_' if iskeyword(name) else ''}")


def _with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Let `--batch_size 4` work as `--batch-size 4`. Values stay unchanged, and all after `--`."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    parts = (argument.partition("=") for argument in words[:cut])
    options = [(name.replace("_", "-") if name.startswith("--") else name) + equals + value for name, equals, value in parts]
    return options + words[cut:]


def add_store(parser: argparse.ArgumentParser, *, is_optional: bool = False, may_be_address: bool = False) -> None:
    """Add STORE and `--json`, which most commands share."""
    kind, text = (_path_or_address, "the store's folder, or its address (s3://…)") if may_be_address else (_path, "the store's folder")
    parser.add_argument("store", metavar="STORE", nargs="?" if is_optional else None, type=kind, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_folder(parser: argparse.ArgumentParser, what: str) -> None:
    """Add FOLDER and `--json`, for a folder that is no store. `what` is its help text."""
    parser.add_argument("folder", metavar="FOLDER", type=_path, help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add `--access`, for commands other than precompute that can make a store."""
    parser.add_argument("--access", choices=("private", "group"), help="who may write a new store, as for precompute")


def _path(text: str) -> str:
    """Return a path as given. A URL is a usage error, and so is the empty path, which a shell makes from an unset variable."""
    from cachestore.core.arguments import refuse_address
    from cachestore.core.errors import BadInput

    if not text:
        raise argparse.ArgumentTypeError("must be a path, not ''")
    try:
        refuse_address("it", text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _path_or_address(text: str) -> str:
    from cachestore.cli.transfer import address
    from cachestore.store.read.opener import is_address

    return address(text) if is_address(text) else _path(text)


def positive(text: str) -> int:
    """Return the whole number of at least 1 that a text of the command line is. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def add_source(add_argument: Callable[..., Any], what: str) -> None:
    """Add `--source`, which may be given several times; `source_of` reads it. `what` says in its help text what for."""
    add_argument(
        "--source",
        metavar="[NAME=]PATH",
        action="append",
        help=f"where the pictures and captions are now, if they moved{what}; with several sources, NAME=PATH for each one that moved",
    )


def add_moved(add_argument: Callable[..., Any], when: str = "") -> None:
    """Add `--source` and the options for a data set's models; `when` begins the help texts of the models."""
    add_source(add_argument, "")
    add_argument("--model", metavar="MODEL", help=f"{when}where the model is now, if it moved; it must have the same fingerprint")
    add_argument("--vae", metavar="PATH", help=f"{when}where the VAE is now, if it moved")
    add_argument("--text-encoder", metavar="PATH", help=f"{when}where the text encoder is now, if it moved")


def source_of(given: "list[str] | None") -> "str | dict[str, str] | None":
    """Return where sources are now: a path, or paths by name. Raises BadInput for a mixture, and for a name given twice."""
    from pathlib import Path

    from cachestore.core.arguments import refuse_address
    from cachestore.core.errors import BadInput

    if given is None:
        return None
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, path) in zip(given, pairs, strict=True):
        refuse_address("--source", path if equals and name and "/" not in name else text)
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    if unnamed := next((name for name, equals, path in pairs if not (name and equals and path)), None):
        raise BadInput(f"--source {unnamed!r} has no name: give one path for a single source, or NAME=PATH for each source that moved")
    paths = {name: path for name, _equals, path in pairs}
    if len(paths) < len(pairs):
        raise BadInput(f"--source gives several paths for one source ({', '.join(given)}): give each source one path")
    return paths


def shared_by(count: int, column: str) -> str:
    """Return the end of a line about a column (`encoder/role …`): how many cells of the sample share the line. Empty for one cell."""
    return "" if count == 1 else f" ({count} {'captions' if column.endswith('/caption') else 'cells'} share it)"


def tensors_of(entry: Mapping[str, Any]) -> list[str]:
    """Return name, dtype and shape of each tensor of an entry, as `describe` gives it."""
    return [f"{name} {tensor['dtype']} {tensor['shape']}" for name, tensor in entry["tensors"].items()]


def failed_values(failures: Iterable[Mapping[str, object]]) -> list[str]:
    """Return a line for each encoder and reason among failures: the sample, or how many samples and the first of them."""
    from cachestore.core.words import first_of

    alike: dict[tuple[object, object], list[str]] = {}
    for failure in failures:
        alike.setdefault((failure["encoder"], failure["reason"]), []).append(repr(failure["sample"]))
    return [
        f"{encoder} of {samples[0] if len(samples) == 1 else f'{len(samples)} samples ({first_of(samples)})'}: {reason}"
        for (encoder, reason), samples in alike.items()
    ]


def failed_samples(failures: "Iterable[Sequence[str]]") -> list[str]:
    """Return a line for each sample and reason among (sample, encoder, reason): what one broken file is needed for fails together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for sample, encoder, reason in failures:
        alike.setdefault((sample, reason), []).append(encoder)
    return [
        f"failed: {sample} ({', '.join(dict.fromkeys(encoders))}): {reason}" if sample else f"failed: {reason}"
        for (sample, reason), encoders in alike.items()
    ]


def near_to(asked: str, listed: Iterable[Iterable[str]]) -> str:
    """Return the ids that may have been meant, as the end of a sentence; empty if no id is similar.

    Ids of the same name in another folder, with another extension or case, or below it come first. Else similar names are searched only
    among 1,000 ids that contain each half of the name: comparing a million would take minutes.
    """
    from difflib import SequenceMatcher, get_close_matches
    from itertools import chain

    name = _bare(asked)
    halves = name[: (len(name) + 1) // 2], name[(len(name) + 1) // 2 :]
    same: list[str] = []
    similar: dict[str, list[str]] = {half: [] for half in halves if half}
    for one in chain.from_iterable(listed):
        folded = one.casefold()
        if name in folded and len(same) < _MAX_COMPARED and (_bare(one) == name or one.startswith(f"{asked}/")):
            same.append(one)
        for half, some in similar.items():
            if half in folded and len(some) < _MAX_COMPARED:
                some.append(one)
    by_name: dict[str, str] = {}
    for one in chain.from_iterable(similar.values()):
        by_name.setdefault(_bare(one), one)
    same.sort(key=lambda one: -SequenceMatcher(None, asked.casefold(), one.casefold()).ratio())
    found = list(dict.fromkeys(same))[:_NEAR] or [by_name[close] for close in get_close_matches(name, by_name, _NEAR)]
    return f"; did you mean {', '.join(map(repr, found))}?" if found else ""


def words_of(text: str) -> tuple[str, ...]:
    """Split a list at its commas: `text,latents`."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def options_of(arguments: argparse.Namespace, without: Collection[str] = (), **instead: Any) -> dict[str, Any]:
    """Return a command's own arguments by name, for a call with the same names. `instead` replaces or adds some."""
    return {name: value for name, value in vars(arguments).items() if name not in {"command", "line", "json", *without}} | instead


def _bare(sample: str) -> str:
    """Return a sample's id without folders, extension and case."""
    last = sample.casefold().rpartition("/")[2]
    return last.rpartition(".")[0] or last


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print one line on stderr; with `as_json` also an object on stdout."""
    print(folded(f"cachestore: {printable(str(error))}", sys.stderr), file=sys.stderr)
    if as_json:
        print_json({"error": str(error), "kind": type(error).__name__})


def say(line: str) -> None:
    """Print one line of a result. Control characters and line ends from files and names are escaped."""
    print(folded(printable(line).replace("\n", "\\n"), sys.stdout))


def tell(arguments: argparse.Namespace, found: object, lines: Iterable[str], *, is_ok: bool = True, otherwise: int = ERROR) -> int:
    """Print a result: `found` with `--json`, else `lines`. Returns the exit code: 0 if `is_ok`, else `otherwise`."""
    if arguments.json:
        print_json(found)
    else:
        for line in lines:
            say(line)
    return OK if is_ok else otherwise


def print_json(value: object) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, default=str))


def printable(text: str) -> str:
    """Return text from files and names with control characters escaped, so that none reaches the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text)
