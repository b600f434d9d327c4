"""`cachestore import`: import another trainer's cache into a store."""

import argparse
from pathlib import Path

from cachestore.cli import FAILURES, PROGRESS, PROGRESS_HELP, add_access, failed_values, options_of, tell, words_of
from cachestore.core.words import first_of, listed, plural
from cachestore.trainers.table import IMPORTED

HELP = "import another trainer's cache, or tars that `export` wrote, into a store"
_MAX_LISTED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("format", metavar="FORMAT", help=listed(IMPORTED, "or"))
    parser.add_argument("folder", metavar="FOLDER", help="the cache's folder; if the trainer caches beside the pictures, usually DATA")
    parser.add_argument("--store", metavar="STORE", required=True, help="the store's folder; made if it does not exist")
    parser.add_argument("--data", metavar="DATA", help="what the cache was made from, as for precompute; not for webdataset")
    parser.add_argument("--name", metavar="NAME", default="train", help="the data set's name (default train)")
    parser.add_argument(
        "--encode", metavar="KINDS", type=words_of, default=(), help="text, latents or both (default: what the folder holds)"
    )
    parser.add_argument(
        "--family", metavar="FAMILY", help="the model family, such as sdxl or flux, if neither the files' names nor the model show it"
    )
    declared = parser.add_argument_group("what made a trainer's cache (at least one of these; not for webdataset)")
    declared.add_argument(
        "--model",
        metavar="MODEL",
        help="the model: its files are hashed into the fingerprint, and verify --recompute can check the values with it",
    )
    setting, given = "what you know about the model, such as model=FLUX.1-dev", "an argument that encode_prompt was called with"
    declared.add_argument("--claim", dest="claims", metavar="NAME=VALUE", type=_pair, action="append", default=[], help=setting)
    declared.add_argument("--vae", metavar="PATH", help="the VAE, if it is not the model's own")
    declared.add_argument("--text-encoder", metavar="PATH", help="the text encoder, if it is not the model's own")
    declared.add_argument("--encode-arg", dest="encode_args", metavar="NAME=VALUE", type=_argument, action="append", default=[], help=given)
    parser.add_argument("--captions", choices=("first", "all"), default="first", help="which captions of each sample (default first)")
    parser.add_argument("--caption-lines", choices=("whole", "each", "first"), default="whole", help="as for precompute")
    parser.add_argument("--caption", metavar="TEXT", help="the caption of samples without one")
    parser.add_argument("--trigger-word", metavar="WORD", help="the trigger word that the trainer puts into every caption")
    parser.add_argument("--fps", metavar="RATE", type=float, help="the frames per second that the trainer used (default: each video's own)")
    parser.add_argument("--replace", action="store_true", help="replace the earlier values under this name")
    add_access(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--progress", choices=PROGRESS, default="auto", help=PROGRESS_HELP)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def _argument(text: str) -> tuple[str, object]:
    import json

    name, value = _pair(text)
    try:
        return name, json.loads(value)
    except (RecursionError, ValueError):
        return name, value


def run(arguments: argparse.Namespace) -> int:
    """Print what was imported. Returns 3 if values of some samples are missing or could not be read."""
    from cachestore.cli.terminal.progress import Progress, style_for
    from cachestore.cli.terminal.stopping import silence, stopping
    from cachestore.trainers.importing import import_cache

    given = options_of(arguments, claims=dict(arguments.claims), encode_args=dict(arguments.encode_args))
    style = style_for(given.pop("progress"))
    with (
        stopping(silence, arguments.line) as stop,
        Progress(Path(arguments.store), style, f"matching the files of {arguments.folder}") as progress,
    ):
        report = import_cache(**given, on_progress=progress.follow, cancel=stop)
    made = report.report
    lines = [f"note: {remark}" for remark in report.remarks]
    lines += failed_values(made.failures)
    for what, paths in (("of no sample", report.unmatched), ("older than the picture or caption", report.stale)):
        if paths:
            lines += [f"note: {plural(len(paths), 'file')} {what}: {first_of(paths, _MAX_LISTED)}"]
    counts = f"{plural(made.encoded, 'value')} imported, {made.reused} already there, {made.failed} failed"
    lines += [f"{plural(made.samples, 'sample')}{f' of {report.family}' if report.family else ''}: {counts}"]
    lines += [f"data set {made.name!r}, generation {made.generation}, in {made.store}"]
    return tell(arguments, report.as_json(), lines, is_ok=report.complete, otherwise=FAILURES)
