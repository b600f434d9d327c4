"""Encoders without torch, sources in memory, clocks that stand still, and jobs made of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import IMAGES, digests_of, references_of, request_for
from cachestore.core.keys import Recipe, digest_bytes, digest_text, input_key
from cachestore.core.ranks import RankInfo
from cachestore.core.samples import Sample
from cachestore.encode.batching.unit import Prepared, Resolved
from cachestore.files.paths import Layout
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.reconcile import Reconciler
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.passes import join_pass, list_passes
from cachestore.jobs.share.plan import ColumnRequest, PlanColumn, build_plan, publish_plan
from cachestore.store.format.line import list_line
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.commit import create_store

ROOT = Path(__file__).parent.parent
YEAR_2000 = 946_684_800 * 10**9
LOG = "FAKE_ENCODER_LOG"
"""Names a file to which every fake encoder of every process adds a line for each unit that it encodes."""


@dataclass
class FakeEncoder:
    """Makes one number of a caption or of a picture's bytes. Counts what is asked of it; `before_encode` may wait, fail or die."""

    encoder: str = "text"
    model: str = "a"
    limit: int = 4
    before_encode: Callable[[list[Any]], None] | None = None
    answer: Callable[[Any], Any] | None = None
    batches: list[list[Any]] = field(default_factory=list)
    prepared: int = 0
    max_tokens: int = 8
    shown: str | None = None
    """The role of the images that it is shown beside captions."""
    image_tokens: int = 0
    captioned: tuple[str, ...] = ()
    """The text encoders that may read captions of their own."""
    roles: tuple[str, ...] = ()
    """The roles that a condition is made from; empty for an encoder of captions, of pictures and videos, or of masks."""

    @property
    def recipe(self):
        pictures = {} if self.shown is None or self.encoder != "text" else {"pictures": {"role": self.shown}}
        return Recipe(self.encoder, {"kind": "fake", "model": self.model, **pictures, **({"roles": [*self.roles]} if self.roles else {})})

    @property
    def encoded(self):
        """Everything that was ever handed over, in order."""
        return [item for batch in self.batches for item in batch]

    def resolve(self, request, read):
        if "images" in request and "caption" in request:
            contents = [read(reference) for reference in references_of(request)]
            if not contents:
                raise EncodeFailed("it is shown no image")
            inputs = digests_of(request, [digest_bytes(content) for content in contents])
            meta = {"input_digest": inputs, "encoder": self.encoder}
            return Resolved(input_key(self.recipe.fingerprint, inputs, {}), request["caption"], inputs, meta)
        if "caption" in request:
            item, inputs, facts = request["caption"], digests_of(request, []), {}
        else:
            contents = [read(reference) for reference in references_of(request)]
            item, inputs = contents[0], digests_of(request, [digest_bytes(content) for content in contents])
            facts = self.facts_of(request)
        meta = {"input_digest": next(iter(inputs.values())) if len(inputs) == 1 else inputs, "encoder": self.encoder}
        transform = {name: request[name] for name in ("resolution",) if name in request}
        return Resolved(input_key(self.recipe.fingerprint, inputs, transform), item, inputs, meta, facts)

    def facts_of(self, request):
        return {"size": [4, 4], "bucket": [4, 4], "resized": [4, 4], "crop": [0, 0, 4, 4]}

    def prepare(self, resolved):
        self.prepared += 1
        if isinstance(resolved.item, bytes) and resolved.item.startswith(b"undecodable"):
            raise EncodeFailed("this is no picture")
        facts = {"tokens": len(resolved.item.split())} if isinstance(resolved.item, str) else {}
        return Prepared(resolved.item, "one group", facts)

    window = 16

    def batch_limit(self, group):
        return self.limit

    def submit(self, batch):
        made = self.encode(batch)
        return lambda: made

    def encode(self, batch):
        items = [item for _key, item in batch]
        if self.before_encode:
            self.before_encode(items)
        self.batches.append(items)
        if LOG in os.environ:
            lines = "".join(json.dumps([os.getpid(), self.encoder, str(key)]) + "\n" for key, _item in batch)
            with Path(os.environ[LOG]).open("a") as file:
                file.write(lines)
        if self.answer:
            return self.answer(batch)
        return {key: {"value": np.frombuffer(bytes(key), np.uint8)} for key, _item in batch}

    def close(self):
        pass

    def count_tokens(self, captions):
        return [len(caption.split()) for caption in captions]

    def entry_bytes(self, _size):
        return 16


@dataclass
class Pictures:
    """A source in memory: reference -> bytes, each with a time that a test sets."""

    files: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    """How often a reference still cannot be read."""

    def read(self, reference):
        self.reads.append(reference)
        if self.failing.get(reference, 0) > 0:
            self.failing[reference] -= 1
            raise OSError(f"{reference}: input/output error")
        if reference not in self.files:
            raise FileNotFoundError(2, "No such file", reference)
        return self.files[reference], self.stat(reference)

    @contextmanager
    def open(self, reference):
        data, stat = self.read(reference)
        yield BytesIO(data), stat

    def stat(self, reference):
        if reference not in self.files:
            return None
        return len(self.files[reference]), self.times.get(reference, YEAR_2000)


@dataclass
class Clock:
    """Stands still until somebody moves it; sleeping moves it."""

    now: float = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def captions(*texts):
    return [Sample(f"{number:04}", {}, (text,)) for number, text in enumerate(texts)]


def pictures(*references):
    return [Sample(reference, {"image": (reference,)}, (f"caption of {reference}",)) for reference in references]


def plan_of(samples: Sequence[Sample], encoders: Sequence[FakeEncoder], *, name="train", extra=(), prompts=()):
    """The plan that `precompute` would lay out for these encoders; its name depends on samples and recipes."""
    columns = []
    for number, encoder in enumerate(encoders):
        role, options = "image", {}
        if encoder.encoder == "text":
            role, options = "caption", {} if encoder.shown is None else {IMAGES: encoder.shown}

        def requests(sample, role=role, options=options):
            values = sample.captions if role == "caption" else sample.images.get(role, ())
            return [request_for(role, options, value, sample.images) for value in values]

        columns.append(ColumnRequest(PlanColumn(number, encoder.encoder, role, options), requests))
    recipes = [encoder.recipe for encoder in encoders]
    request = digest_text(json.dumps([name, [recipe.fingerprint for recipe in recipes]]))
    content = digest_text(repr([(sample.id, sample.captions, sample.images) for sample in samples]))
    texts = [(n, {"caption": text}) for n, one in enumerate(encoders) if one.encoder == "text" for pair in prompts for text in pair]
    asked: dict[str, Any] = {"catalog": name, "request": request, "content": content, "recipes": recipes}
    return build_plan(**asked, samples=samples, columns=columns, extra=[*extra, *texts], prompts=prompts)


LISTINGS = count(1)
"""Numbers for the listings of jobs: each lists its source after those that were made before it."""


def job(
    root,
    samples,
    encoders: Sequence[Any],
    *,
    source: Any = None,
    launch="launch",
    rank: int | None = 0,
    world=1,
    extra=(),
    prompts=(),
    **options,
) -> Any:
    """A job over a store, which is made if needed, with its plan published."""
    layout = create_store(Path(root))
    plan = plan_of(samples, encoders, extra=extra, prompts=prompts)
    publish_plan(layout, plan)
    read: Any = source or Pictures()
    options.setdefault("listing_number", next(LISTINGS))
    return Job(layout, plan, encoders, read, RankInfo(rank, world), launch, **options)


def run(root, samples, *encoders, **options):
    """Run a pass over captions or pictures; a launch of its own each time, unless one is given."""
    options.setdefault("launch", f"launch {os.urandom(4).hex()}")
    return run_pass(job(root, samples, list(encoders), **options))


def reconciler(one: Job, number=None):
    from cachestore.jobs.share.passes import PassRef

    ref = PassRef(one.plan.name, number or list_passes(one.layout, one.plan.name)[-1])
    return Reconciler(one, ref)


def publish_catalog(layout, catalog):
    """Publish a catalog after whatever is there, without comparing, unless it is equal to the newest; returns (generation, digest)."""
    last, newest = list_line(layout, catalog.name).highest, newest_catalog(layout, catalog.name, io="mmap")
    draft = draft_of(catalog)
    if newest is not None and draft.is_same_as(newest):
        return newest.generation, newest.digest
    assert publish_draft(layout, draft, after=last)
    return last + 1, draft.digest


def catalog(root, name="train") -> Any:
    found = newest_catalog(Layout(Path(root)), name)
    assert found is not None
    return found


def captioned(root: Path, count: int) -> Path:
    """A new folder of pictures with captions, modified long ago."""
    root.mkdir()
    for n in range(count):
        (root / f"{n}.png").write_bytes(b"picture %d" % n)
        (root / f"{n}.txt").write_text(f"caption {n}")
        os.utime(root / f"{n}.png", (n, n))
    return root


def numbered_pictures(folder: Path, count: int) -> Path:
    """A new folder of pictures without captions, modified long ago."""
    folder.mkdir()
    for n in range(count):
        (folder / f"{n:02}.png").write_bytes(b"picture %d" % n)
        os.utime(folder / f"{n:02}.png", (n, n))
    return folder


def flip_entry(root, sample, encoder, name="train"):
    """Change a byte of the entry that a sample's cell names, as a failing disk would; returns its key."""
    layout, found = Layout(Path(root)), catalog(root, name)
    column = next(column for column in found.columns if column.encoder == encoder)
    key = column.row_keys(list(found.ids).index(sample))[0]
    with closing(load_snapshot(layout)) as snapshot:
        location = snapshot.find([key])[0][0]
    path = layout.segment(location.segment.digest)
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[location.offset] ^= 0xFF
    path.write_bytes(raw)
    return key


def as_launch(one: Job, launch, **options) -> Any:
    """The same job under another launch, which lists the source anew."""
    return replace(one, launch=launch, **{"listing_number": next(LISTINGS), **options})


def open_pass(one: Job):
    ref = join_pass(one.layout, one.plan.name, one.launch)
    with closing(load_snapshot(one.layout)) as snapshot:
        reconciler(one).open_pass(snapshot)
    return ref


def ending(plan, **fields):
    """What `done.json` says of a pass at least: nothing done, and no data set."""
    return {"complete": True, "name": "", "plan": plan, "generation": 0, **dict.fromkeys(("reused", "encoded", "failed"), 0), **fields}


def asks_for(option: str, *data: object) -> Callable[[Any], bool]:
    """For `pytest.raises(..., check=)`: whether an error names this argument as the one that would have to change, and these data."""
    return lambda error: error.option == option and tells_of(*data)(error)


def tells_of(*data: object) -> Callable[[Any], bool]:
    """For `pytest.raises(..., check=)`: whether an error names these data: a key, a sample, a file, a number that was passed."""
    return lambda error: all(str(one) in str(error) for one in data)


def raising(error):
    """A function that raises this, whatever it is called with."""

    def fail(*_arguments, **_named):
        raise error

    return fail


def refusing(code):
    """A system call that is refused with this errno."""
    return raising(OSError(code, os.strerror(code)))


def overtaken(monkeypatch, module, name, action):
    """Let something happen once, just before a function is called there."""
    really = getattr(module, name)

    def first(*given, **named):
        monkeypatch.setattr(module, name, really)
        action()
        return really(*given, **named)

    monkeypatch.setattr(module, name, first)


def examples(most):
    """So many examples of a property that takes long, or fewer where the profile asks for fewer."""
    from hypothesis import settings

    return settings(max_examples=min(most, settings.default.max_examples))


def adds_up(report):
    return report.wanted == report.reused + report.encoded + report.failed + report.missing


def logged(path):
    """(pid, encoder, key) of every unit that fake encoders of all processes encoded."""
    return [tuple(json.loads(line)) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def started(arguments: list[Any], cwd: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """A Python process whose output is read by `communicate`."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=cwd, env=os.environ | environment, **pipes)


def program(source: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a Python program beside the repository. Ranks of this process are hidden from it."""
    return started(["-c", source, *arguments], ROOT, {"PYTHONPATH": str(ROOT), **environment})


# precompute with fake encoders: in this process, and in others through `at_start/sitecustomize.py`

PATHS = os.pathsep.join([str(ROOT / "tests/cli/at_start"), str(ROOT)])
GATE = "FAKE_ENCODER_GATE"
"""A folder: an encoder leaves `<pid>.begun` there, and waits until there is a file `open`."""


POISON = "FAKE_ENCODER_POISON"
"""Names an item of `fill` that kills the process which encodes it, as a fault in a decoder or a driver would."""


FAKE_MODEL = "FAKE_MODEL"
"""Names the one model whose encoders are fake in started processes; without it all are."""


@dataclass
class Makers:
    """Stands in for `request.make_encoders`: makes fake encoders by the model's name, and keeps those it made."""

    made: list[FakeEncoder] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., FakeEncoder] = FakeEncoder
    has_roles: bool = False
    """Whether there are encoders of masks and of first frames too."""

    def __call__(self, _layout, request, **_how):
        options = {"model": request.model, **self.options}
        encoders = tuple(self.make(name, **options) for name in ("text", "latents") if name in request.encode)
        if self.has_roles:
            encoders += (self.make("mask", **options), self.make("first_frame", roles=("first_frame",), **options))
        self.made += encoders
        return encoders

    def encoded(self, name=None):
        """What was encoded since the last time this was asked, of one encoder or of all."""
        found = [item for encoder in self.made if name in (None, encoder.encoder) for item in encoder.encoded]
        self.made = [encoder for encoder in self.made if name not in (None, encoder.encoder)]
        return found


def planned(layout: Layout, request: Any, **how: Any) -> Any:
    """What `precompute` plans for a request, with the plan published."""
    from cachestore.jobs.plan.planning import list_request, plan_request, publish_if_new

    return publish_if_new(plan_request(layout, request, list_request(request), **how))


def roles_manifest(folder: Path, rows: int = 6) -> Path:
    """A manifest in a new folder whose rows have each role, last changed long ago: two pictures, then a video, and so on.

    A picture has control images, a mask and a reference; every second video has a first frame, the others show their own.
    """
    folder.mkdir()
    listed = []
    for n in range(rows):
        names = {"video": ["mp4"], "first_frame": ["first.png"] if n % 2 else []}
        if n % 3 < 2:
            names = {"image": ["png"], "control": ["edge.png", "depth.png"][: 1 + n % 2], "mask": ["mask.png"], "reference": ["other.png"]}
        files = {role: [f"{n}.{suffix}" for suffix in suffixes] for role, suffixes in names.items() if suffixes}
        for name in (name for some in files.values() for name in some):
            (folder / name).write_bytes(f"{folder.name} {name}".encode())
            os.utime(folder / name, (YEAR_2000 // 10**9 + n, YEAR_2000 // 10**9 + n))
        row = {role: some if len(some) > 1 else some[0] for role, some in files.items()}
        listed.append(json.dumps({"id": f"{n}", "caption": f"caption {n % 4}", **row}))
    manifest = folder / "rows.jsonl"
    manifest.write_text("\n".join(listed) + "\n")
    return manifest


def plug_in(options: dict[str, Any], **how: Any):
    """Let `precompute` of this process make fake encoders, and look for none of their models in the hub's cache.

    Pictures that a test has just made with an old modification time are trusted.
    """
    from cachestore.encode.models import hub
    from cachestore.files import stat_record
    from cachestore.jobs.plan import planning as request

    makers, real, only = Makers(options=options, **how), request.make_encoders, os.environ.get(FAKE_MODEL)
    request.make_encoders = lambda layout, asked, **how: (makers if only in (None, asked.model) else real)(layout, asked, **how)
    if CALLS in os.environ:
        log_calls(setattr)
    stat_record.CHANGED_SECONDS = 0  # pyright: ignore[reportAttributeAccessIssue] - as conftest does for tests in this process
    hub._cached = lambda _name, _revision: None  # the hub's library takes as long to import as everything else together
    return makers


CALLS = "FAKE_CALLS_LOG"
"""Names a file to which every process adds a line for each source that it lists, and for each plan that it builds."""


def log_calls(put: Callable[[Any, str, Any], None]):
    """Log the calls that list a source or build a plan; `put` is `setattr` or monkeypatch's."""
    from cachestore.jobs.plan import planning

    def logging(name: str, call: Callable[..., Any]):
        def logged(*arguments: Any, **named: Any):
            with Path(os.environ[CALLS]).open("a") as file:
                file.write(f"{name}\n")
            return call(*arguments, **named)

        return logged

    for name in ("list_path", "list_sources", "build_plan"):
        put(planning, name, logging(name, getattr(planning, name)))


def work_here(monkeypatch):
    """Let commands and calls of this process do themselves what they would start one worker for. Tests of processes start them."""
    from cachestore.cli.work import silence, to_stderr
    from cachestore.jobs.start import launching
    from cachestore.jobs.start.here import precompute_here
    from cachestore.jobs.start.processes import LISTING

    def work(request, _rank_info, launch, care, variables, *, planned=None):
        say = silence if care.is_quiet else to_stderr
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            number = os.environ.get(LISTING, "")
            how: dict[str, Any] = {"say": say, "warn": say, "planned_before": planned, "launch": launch}
            return precompute_here(request, number=int(number) if number.isdecimal() else None, **how).as_json()

    monkeypatch.setattr(launching, "run_workers", work)


def at_the_gate(items):
    """Tell that a batch has begun, and wait until the test lets it go on."""
    folder = Path(os.environ[GATE])
    (folder / f"{os.getpid()}.begun").touch()
    while not (folder / "open").exists():
        time.sleep(0.01)


def is_running(pid):
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def fake_processes(monkeypatch):
    """Encoders are fake in processes that are started from here."""
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("FAKE_ENCODERS", "1")


class Gate:
    """The test's side of `at_the_gate`."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def wait(self):
        while not (standing := sorted(self.folder.glob("*.begun"))):
            time.sleep(0.01)
        return int(standing[0].stem)

    def open(self):
        """Let it go on, and everybody who comes later."""
        (self.folder / "open").touch()


def command(*arguments, module="cachestore", cwd: Path = ROOT, **environment: str):
    """Start `python -m cachestore …` in which encoders are fake; `communicate` reads its output."""
    return started(["-m", module, *arguments], cwd, {"PYTHONPATH": PATHS, "FAKE_ENCODERS": "1", **environment})


# Whole jobs in processes of their own


def names(count):
    """Names of keys, and what is encoded under them."""
    return [f"name {n}" for n in range(count)]


def encode(batch):
    """An `encode` for `fill`: a value is the bytes of its key."""
    return {key: {"value": np.frombuffer(bytes(key), np.uint8)} for key, _item in batch}


def fill_with(store, *names, function=encode, **options):
    """Fill a store with values named by texts; the item of each is its name."""
    import cachestore as cs

    return cs.fill(store, [(cs.key(name), name) for name in names], function, **options)


def holds(root, wanted):
    """Whether a store is whole and holds exactly the keys of these names."""
    import cachestore as cs

    report = cs.verify(root)
    with cs.open(root) as store:
        return report.ok and set(store.keys()) == {cs.key(name) for name in wanted}


def encode_and_log(batch):
    """An `encode` for `fill`: stops at the gate where there is one, and logs what it makes."""
    if GATE in os.environ:
        at_the_gate(batch)
    if any(item == os.environ.get(POISON) for _key, item in batch):
        os.kill(os.getpid(), signal.SIGSEGV)
    with Path(os.environ[LOG]).open("a") as file:
        file.write("".join(json.dumps([os.getpid(), "values", str(key)]) + "\n" for key, _item in batch))
    return encode(batch)


def warm_up():
    """Import what jobs import only when they run, so that forks of this process have it."""
    from PIL import Image

    for name in ("filelock._soft", "lmdb", "numpy.ma", "PIL.ImageOps", "cachestore.store.write.writer", "cachestore.store.read.fetch"):
        import_module(name)
    for name in ("plan.planning", "start.precompute", "start.forecast", "start.fill"):
        import_module(f"cachestore.jobs.{name}")
    for name in ("recipes", "scripts", "pictures.clips", "models.single_file"):
        import_module(f"cachestore.encode.{name}")
    Image.init()


def play(body):
    """One job of a `Zygote`: `fill` with names as keys, or `precompute` with fake encoders. Returns its report."""
    import cachestore as cs
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.start.here import precompute_here

    if "fill" in body:
        with cs.open(body["store"], mode="a") as store:
            return cs.fill(store, [(cs.key(name), name) for name in body["fill"]], encode_and_log, **body.get("options", {})).as_json()
    plug_in({"limit": 2})
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in body.get("options", {}).items()}
    return precompute_here(PrecomputeRequest(body["precompute"], "model", body["store"], **options)).as_json()


ZYGOTE = """
import json, os, sys, traceback
from pathlib import Path
from tests import fakes

fakes.warm_up()
os.fsync = os.fstat
for line in sys.stdin:
    pids = []
    for number, body in enumerate(json.loads(line)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(body["environment"])
                Path(body["out"]).write_text(json.dumps(fakes.play(body)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Zygote:
    """Starts jobs as processes in milliseconds: one interpreter without threads that has everything imported, and forks."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def begin(self, *jobs, **environment):
        """Start jobs at once. Each is a mapping with `store`, `fill` or `precompute`, and perhaps `options` and `environment`."""
        assert self._process.stdin is not None
        self._outs = []
        for body in jobs:
            self._count += 1
            self._outs.append(self._folder / f"report {self._count}.json")
            body["out"] = str(self._outs[-1])
            body["environment"] = {LOG: str(self._folder / "log"), **environment, **body.get("environment", {})}
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()

    def end(self):
        """Wait for all of them: (exit code, report or None) of each."""
        assert self._process.stdout is not None
        codes = json.loads(self._process.stdout.readline())
        return [(code, json.loads(out.read_text()) if out.exists() else None) for code, out in zip(codes, self._outs, strict=True)]

    def run(self, *jobs, **environment):
        """Start jobs at once and wait for all of them."""
        self.begin(*jobs, **environment)
        return self.end()

    def log(self):
        """What all jobs encoded since the last time this was asked."""
        path = self._folder / "log"
        found = logged(path)
        path.unlink(missing_ok=True)
        return found

    def close(self):
        """End the interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
