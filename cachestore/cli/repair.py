"""`cachestore repair`: make a store consistent; with `--refill` also complete."""

import argparse

from cachestore.cli import DAMAGE, OK, add_source, add_store, print_json, say, source_of

HELP = "salvage, quarantine and rebuild; with --refill encode again what was lost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--refill", action="store_true", help="encode again what has no valid copy")
    add_source(parser.add_argument, "")
    parser.add_argument(
        "--model", metavar="MODEL", help="with --refill: where the model is now, if it moved; it must have the same fingerprint"
    )
    parser.add_argument("--vae", metavar="PATH", help="with --refill: where the VAE is now, if it moved")
    parser.add_argument("--text-encoder", metavar="PATH", help="with --refill: where the text encoder is now, if it moved")


def run(arguments: argparse.Namespace) -> int:
    """Print what was done, or would be; 4 if something is still missing then, an entry or a data set's newest catalog."""
    from cachestore.maintain.refill import repair

    report = repair(
        arguments.store,
        dry_run=arguments.dry_run,
        refill=arguments.refill,
        source=source_of(arguments.source),
        model=arguments.model,
        vae=arguments.vae,
        text_encoder=arguments.text_encoder,
    )
    if arguments.json:
        print_json(report.as_json())
    else:
        would = "would be " if report.dry_run else ""
        say(f"{report.salvaged} entries {would}salvaged, {len(report.quarantined)} files {would}quarantined")
        if report.dry_run:
            say(f"without --refill {report.missing} would still be missing")
        else:
            say(f"{report.refilled} entries encoded again, {report.missing} still missing")
        for name in report.rebuilt:
            say(f"{name} {would}built again")
        for finding in report.findings:
            say(f"{finding.kind}: {finding.message}")
    return DAMAGE if report.missing or any(finding.kind == "bad-catalog" for finding in report.findings) else OK
