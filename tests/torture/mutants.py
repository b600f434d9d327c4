"""Mutants: copies of the package with one protection removed each. A campaign that finds nothing in one of them proves nothing.

The package is copied and one passage of one file replaced, which must be there exactly once; the campaign then runs in a process that
imports the copy. Without a mutation it must find nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.torture.campaign import scratch

ROOT: Final = Path(__file__).parent.parent.parent
_SECONDS: Final = 3_600


@dataclass(frozen=True, slots=True)
class Mutant:
    """A protection, where it stands, what stands there without it, and which campaign must notice, within so many points."""

    file: str
    protected: str
    bare: str
    campaign: str
    points: int


_ANSWERS: Final = ("answers", 150)
_CRASHES: Final = ("crashes", 400)
_EXCHANGE: Final = ("exchange", 100)
_OVERTAKING: Final = ("overtaking", 120)
_PUBLISH: Final = ("publish", 60)
_PUBLISH_LONG: Final = ("publish", 250)
_SOURCES: Final = ("sources", 250)
_TRAINING: Final = ("training", 16)
_TRANSFERS: Final = ("transfers", 100)

MUTANTS: Final[Mapping[str, Mutant]] = {
    "one thread after a fork": Mutant("core/forked.py", "_is_forked, _has_read = _has_torch(), False", "_has_read = False", "forks", 3),
    "file fsync": Mutant(
        "files/publish.py", '            failpoint("publish.before_fsync")\n            in_use.sync(descriptor)\n', "", *_CRASHES
    ),
    "directory fsync": Mutant(
        "files/publish.py", "    _remove(temporary)\n    sync_folder(final.parent)\n", "    _remove(temporary)\n", *_CRASHES
    ),
    "second look": Mutant(
        "files/publish.py",
        "    check_for_writing(layout)\n"
        "    published = _link(layout, temporary, final)\n"
        '    failpoint("publish.after_link")\n'
        "    _remove(temporary)\n"
        "    sync_folder(final.parent)\n"
        "    check_for_writing(layout, final)",
        "    published = _link(layout, temporary, final)\n    _remove(temporary)\n    sync_folder(final.parent)",
        "gone",
        200,
    ),
    "read-back": Mutant("files/publish.py", "if digest_file(temporary) != digest:", "if temporary is None:", "flips", 150),
    "checksum": Mutant(
        "store/read/fetch.py",
        "if checksum_of(key, located.specs[row], buffers) != located.checksums[row]:",
        "if not located.checksums[row]:",
        *_EXCHANGE,
    ),
    "key bound to checksum": Mutant("store/format/entry.py", "Checksum(key + specs.text)", "Checksum(specs.text)", *_EXCHANGE),
    "acknowledgement order": Mutant(
        "store/write/append.py",
        "    if not publish(layout, path, chunks, digest=digest, read_only=True) and not _is_whole(path, digest, contents.size_bytes):\n"
        "        return write_segment(layout, draft, origin=origin, edition=edition + 1)\n",
        "    from cachestore.files.publish import make_folder\n"
        "    make_folder(layout, layout.temporary, path.parent)\n"
        '    __import__("threading").Thread(target=publish, args=(layout, path, [bytes(chunk) for chunk in chunks])).start()\n',
        *_CRASHES,
    ),
    "order of listings": Mutant(
        "jobs/run/catalog_maker.py",
        "            may_follow = _may_follow(job, previous)\n",
        "            may_follow = True\n",
        *_OVERTAKING,
    ),
    "order of push": Mutant(
        "remote/push.py",
        '        mover.each("sending segments", plan.segments, lambda file: self._send_segment(mover, file))\n',
        "        for _name, _generation, file in plan.catalogs:\n"
        "            self._send_new(mover, file, TABLE_LIMIT_BYTES)\n"
        '        mover.each("sending segments", plan.segments, lambda file: self._send_segment(mover, file))\n',
        *_TRANSFERS,
    ),
    "order of pull": Mutant(
        "remote/pull.py",
        '        mover.each("receiving segments", plan.segments, lambda file: self._receive_segment(mover, file))\n',
        "        for name, generation, _file in plan.catalogs:\n"
        "            path = self._outline.catalog(name, generation)\n"
        "            path.exists() or self._fetch_catalog(name, generation)\n"
        "            publish(layout, layout.catalog(name, generation), [path.read_bytes()])\n"
        '        mover.each("receiving segments", plan.segments, lambda file: self._receive_segment(mover, file))\n',
        *_TRANSFERS,
    ),
    "checksums of the copy of a catalog": Mutant(
        "store/format/catalog.py",
        "check_table(path, FORMAT, VERSION) != expected.file_digest",
        "open_table(path, FORMAT, VERSION).digest != expected.file_digest",
        "answers",
        450,
    ),
    "second call for an object": Mutant("remote/outline.py", "TRIES: Final = 3\n", "TRIES: Final = 1\n", *_ANSWERS),
    "comparison of ranks": Mutant(
        "train/batches.py", "        if not self._is_compared:\n", "        if self._is_compared is None:\n", *_TRAINING
    ),
    "epoch of a loader": Mutant("train/epoch.py", "return self.get() if own is None else own\n", "return self.get()\n", *_TRAINING),
    "one who deals": Mutant("train/seats.py", "    if not seat.yields_all:\n", "    if seat.step < 1:\n", *_TRAINING),
    "account of rows": Mutant(
        "sources/remarks.py",
        "            for one in refused:\n                remarks.refused.append(one)\n",
        "            del refused\n",
        *_SOURCES,
    ),
    "account of second ids": Mutant(
        "sources/listing.py",
        "    if again:\n        _refuse_again(parse, again, remarks)\n",
        "",
        "sources",
        1_000,
    ),
    "account of files": Mutant(
        "sources/unused.py",
        "        self.counts[reason] = self.counts.get(reason, 0) + 1\n",
        "        return\n",
        *_SOURCES,
    ),
    "second look at marks": Mutant(
        "store/write/session.py",
        "        check_keys(self._store, self.name, attempt.keys(), attempt.samples_of)\n",
        "        attempt.number or check_keys(self._store, self.name, attempt.keys(), attempt.samples_of)\n",
        *_PUBLISH_LONG,
    ),
    "listing before the look at marks": Mutant(
        "store/write/link.py",
        "        entry, number = next_entry(line, last), line.highest + 1\n",
        "        entry, number = next_entry(line, last), list_line(layout, name).highest + 1\n",
        *_PUBLISH_LONG,
    ),
    "whole overlay": Mutant(
        "store/read/rows.py",
        "    above = [read_entry(layout, name, number) for number in entries]\n",
        "    above = [read_entry(layout, name, number) for number in entries[:2]]\n",
        *_PUBLISH,
    ),
    "removals in a fold": Mutant(
        "store/write/folding.py",
        "    if catalog.generation not in list_line(layout, catalog.name).tables:\n",
        "    from cachestore.store.format.line import RowChange, lay\n"
        "    before = read_data_set(layout, catalog.name, list_line(layout, catalog.name).tables[-1])\n"
        "    removed = {sample: RowChange(parts={'x': ()}) for sample in before.ids if sample not in catalog.ids}\n"
        "    catalog = lay(catalog, removed)\n"
        "    if catalog.generation not in list_line(layout, catalog.name).tables:\n",
        *_PUBLISH,
    ),
    "rows in a fold": Mutant(
        "store/write/folding.py",
        "    if catalog.generation not in list_line(layout, catalog.name).tables:\n",
        "    from cachestore.store.format.line import RowChange, lay\n"
        "    catalog = lay(catalog, dict.fromkeys(catalog.ids[3:], RowChange(is_removed=True)))\n"
        "    if catalog.generation not in list_line(layout, catalog.name).tables:\n",
        *_PUBLISH,
    ),
    "fence before removals": Mutant("care/lines.py", "    if with_fence:\n", "    if with_fence and not name:\n", "publish", 250),
    "listing after a link": Mutant(
        "store/write/link.py",
        "        if publish(layout, path, chunks, read_only=True) and is_in_line(layout, name, number, entry.mark):\n",
        "        if publish(layout, path, chunks, read_only=True):\n",
        *_PUBLISH,
    ),
    "link refusal": Mutant("files/opening.py", '= READ_FLAGS | getattr(os, "O_NOFOLLOW", 0)\n', "= READ_FLAGS\n", *_EXCHANGE),
}

_PROGRAM: Final = """
import json, sys
import cachestore
from chaos import torture
name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
outcome = torture.find_campaigns()[name].play(count, seed)
print(json.dumps({"package": cachestore.__file__, "points": outcome.points, "violations": outcome.violations}))
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a campaign saw of a mutant."""

    points: int
    violations: tuple[str, ...]


def bare_copy(mutant: Mutant | None, folder: Path) -> None:
    """The package in a folder, without one protection, or whole. Raises ValueError where what protects is not found exactly once."""
    shutil.copytree(ROOT / "cachestore", folder / "cachestore", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is None:
        return
    path = folder / "cachestore" / mutant.file
    text = path.read_text()
    if text.count(mutant.protected) != 1:
        times = text.count(mutant.protected)
        raise ValueError(f"{mutant.file} has {mutant.protected!r} {times} times: bring tests/torture/mutants.py up to date")
    path.write_text(text.replace(mutant.protected, mutant.bare))


def play(mutant: Mutant | None, campaign: str, points: int, seed: int) -> Seen:
    """Let a campaign look at a mutant, or at the whole package. Raises RuntimeError where it did not come to an end."""
    with scratch() as folder:
        bare_copy(mutant, folder)
        paths = os.pathsep.join(map(str, (folder, ROOT / "scripts", ROOT)))
        command = [sys.executable, "-c", _PROGRAM, campaign, str(points), str(seed)]
        surroundings = {**os.environ, "PYTHONPATH": paths}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=folder, env=surroundings)
        if ended.returncode != 0:
            raise RuntimeError(f"the campaign {campaign!r} ended with {ended.returncode}: {ended.stderr[-2000:]}")
        reported = json.loads(ended.stdout.splitlines()[-1])
        assert Path(reported["package"]).is_relative_to(folder), reported["package"]
        return Seen(reported["points"], tuple(reported["violations"]))
