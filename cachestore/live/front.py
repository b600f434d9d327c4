"""The front door: arms this process, and runs the trainer's own script in it as Python would have."""

import argparse
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cachestore.core.errors import CacheStoreError
from cachestore.live.arming import ADAPTERS, Setting, arm, load_adapter
from cachestore.live.run import current
from cachestore.store.write.writer import open_store

ERROR: Final = 1
USAGE: Final = 2
_CONFIG: Final = (".toml", ".yaml", ".yml", ".json")


def main(arguments: Sequence[str]) -> int:
    """Run a trainer's script with its cache in the store. Returns 2 for a wrong command line; else the script ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m cachestore.live",
        description="Run a trainer's own script with its cache in a store. Everything after SCRIPT belongs to the script.",
    )
    parser.add_argument("trainer", metavar="TRAINER", help=f"{', '.join(ADAPTERS)}, or the module of your own adapter")
    parser.add_argument("--store", required=True, metavar="STORE", help="the folder of the store; it is made if it is not there")
    parser.add_argument("--name", metavar="NAME", help="the data set's name (default: TRAINER/ and the stem of the script's configuration)")
    parser.add_argument(
        "--read", metavar="DATASET", help="read this data set, which `precompute --buckets TRAINER` made; nothing is encoded"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the trainer's script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    chosen = parser.parse_args(arguments)
    try:
        load_adapter(chosen.trainer)
        name = chosen.name or f"{chosen.trainer}/{name_of(chosen.script, chosen.arguments)}"
        store = os.path.abspath(chosen.store)
        generation = open_store(store).dataset(chosen.read).generation if chosen.read else None  # all processes of this one read the same
        arm(Setting(ADAPTERS.get(chosen.trainer, str(chosen.trainer)), store, name, chosen.read or "", generation))
        if (files := current().exported) is not None and files.lacking:
            print(f"cachestore.live: note: {files.lacking}", file=sys.stderr)
    except CacheStoreError as error:
        print(f"cachestore.live: error: {error}", file=sys.stderr)
        return USAGE
    if not chosen.is_module and not Path(chosen.script).is_file():
        print(f"cachestore.live: error: there is no script {chosen.script}; give its path after the options", file=sys.stderr)
        return USAGE
    sys.argv = [chosen.script, *chosen.arguments]
    try:
        if chosen.is_module:
            runpy.run_module(chosen.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(chosen.script))  # as Python does for a script
            runpy.run_path(chosen.script, run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            print(f"cachestore.live: {current().last_line()}", file=sys.stderr)
    return 0


def name_of(script: str, arguments: Sequence[str]) -> str:
    """Return a name for a run's data: the stem of the first file among its arguments that is a configuration, else its output's name."""
    values = [value.rpartition("=")[2] if value.startswith("-") else value for value in arguments]
    configs = [Path(value).stem for value in values if value.endswith(_CONFIG) and Path(value).is_file()]
    outputs = [after for before, after in zip(arguments, arguments[1:], strict=False) if before == "--output_name"]
    stem = (configs or outputs or [Path(script).stem])[0]
    return re.sub(r"[^\w.-]+", "-", stem)
