"""`cachestore import`: take what another trainer has cached into a store."""

import argparse
from typing import TYPE_CHECKING

from cachestore.cli import FAILURES, OK, print_json, printable
from cachestore.core.words import first_of

if TYPE_CHECKING:
    from cachestore.interop.import_request import ImportReport

HELP = "take another trainer's cache into a store"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("format", metavar="FORMAT", help="sd-scripts, simpletuner, musubi, ai-toolkit or diffusion-pipe")
    parser.add_argument("folder", metavar="FOLDER", help="the cache; of sd-scripts and ai-toolkit usually DATA itself")
    parser.add_argument("--store", metavar="STORE", required=True, help="the store's folder; made if it does not exist")
    parser.add_argument("--data", metavar="DATA", required=True, help="what the cache was made from, as for precompute")
    parser.add_argument("--name", metavar="NAME", default="train", help="of the data set (default train)")
    parser.add_argument("--encode", metavar="KINDS", type=_names, default=(), help="text, latents or both (default: what the folder holds)")
    parser.add_argument("--family", metavar="FAMILY", help="such as sdxl or flux, where neither file names nor the model tell it")
    claim = parser.add_argument_group("what made it (becomes part of the fingerprint; one of these is needed)")
    claim.add_argument("--model", metavar="MODEL", help="the model: its files are digested, and verify --recompute holds values against it")
    claim.add_argument("--claim", metavar="NAME=VALUE", type=_pair, action="append", default=[], help="a setting, such as model=FLUX.1-dev")
    claim.add_argument("--vae", metavar="PATH", help="the VAE, where it is not the model's own")
    claim.add_argument("--text-encoder", metavar="PATH", help="the text encoder, where it is not the model's own")
    claim.add_argument(
        "--encode-arg", metavar="NAME=VALUE", type=_argument, action="append", default=[], help="what encode_prompt was given"
    )
    parser.add_argument("--captions", choices=("first", "all"), default="first", help="of each sample (default first)")
    parser.add_argument("--caption-lines", choices=("whole", "each", "first"), default="whole", help="as for precompute")
    parser.add_argument("--caption", metavar="TEXT", help="what a sample without a caption gets")
    parser.add_argument("--trigger-word", metavar="WORD", help="ai-toolkit's trigger word, which it puts into every caption")
    parser.add_argument("--replace", action="store_true", help="take the place of other values under this name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"NAME=VALUE, not {text!r}")
    return name, value


def _argument(text: str) -> tuple[str, object]:
    import json

    name, value = _pair(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(arguments: argparse.Namespace) -> int:
    """Print what was imported; 3 if some samples' values are missing or could not be read."""
    from cachestore.interop.importing import import_cache

    report = import_cache(
        arguments.format,
        arguments.folder,
        store=arguments.store,
        data=arguments.data,
        model=arguments.model,
        claims=dict(arguments.claim),
        family=arguments.family,
        name=arguments.name,
        encode=arguments.encode,
        captions=arguments.captions,
        caption_lines=arguments.caption_lines,
        caption=arguments.caption,
        trigger_word=arguments.trigger_word,
        vae=arguments.vae,
        text_encoder=arguments.text_encoder,
        encode_args=dict(arguments.encode_arg),
        replace=arguments.replace,
    )
    if arguments.json:
        print_json(report.as_json())
    else:
        _tell(report)
    return OK if report.complete else FAILURES


def _tell(report: "ImportReport") -> None:
    made = report.report
    for remark in report.remarks:
        print(printable(f"note: {remark}"))
    for failure in made.failures:
        print(printable(f"{failure['encoder']} of {failure['sample']!r}: {failure['reason']}"))
    for what, paths in (("are no sample's", report.unmatched), ("are older than what they should be of", report.stale)):
        if paths:
            print(printable(f"note: {len(paths)} files {what}: {first_of(paths, _SHOWN)}"))
    counts = f"{made.encoded} values imported, {made.reused} were there, {made.failed} failed"
    print(printable(f"{made.samples} samples of {report.family}: {counts}"))
    print(printable(f"data set {made.name!r}, generation {made.generation}, in {made.store}"))
