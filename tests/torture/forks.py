"""Forks of processes that use torch: each child reads as its parent does, bit for bit, and in time.

Tensors have the sizes of real models, so torch divides every operation on them among threads. The parents are programs of their own, as
they have these threads: some have read, one of them with JAX and one with tokenizers beside torch; the children of one are the first to
import cachestore, and those of another the first to import torch.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from tests.torture.campaign import Campaign, Outcome, scratch

CHILD_SECONDS: Final = 20
"""A child that lives longer hangs."""
HANG_SECONDS: Final = 3
"""As that, where a hang is what is looked for."""
THREADS: Final = 4
"""Of torch, in a parent that sets them; others have as many as there are processors."""
ALL: Final = [0, 1, 2]

# ------------------------------------------------------------------------------------------------------------- the stores


def build(folder: Path) -> None:
    """Make two stores with latents of 16 x 128 x 128 with moments, masks and control images.

    One has text of 512 x 4096 in bfloat16, the other text in float32 that is joined, 512 x 2048.
    """
    from cachestore.core.keys import Recipe
    from tests.train import stores

    rows = [stores.Row(f"{n}.png", (f"caption {n}",), bucket=(1024, 1024), has_mask=True, controls=[(1024, 1024)]) for n in ALL]
    masks = Recipe("mask", {"kind": "masks"}, {"format": 1, "stored": "mask", "factor": 8})
    widths = {"prompt_embeds": 4096, "prompt_embeds.text_encoder": 768, "prompt_embeds.text_encoder_2": 1280, "pooled_prompt_embeds": 768}
    for name, family in (("flux", stores.FLUX), ("sdxl", stores.SDXL)):
        made = stores.recipes(family, latent_channels=16)
        stored = stores.stored_text if name == "sdxl" else _as_bfloat16
        with patch.multiple(stores, CHANNELS=16, LENGTH=512, WIDTHS=widths, stored_text=stored):
            stores.make_store(folder / name, rows, stores.Recipes(made.text, made.latents, masks))


def _as_bfloat16(recipe: Any, caption: str, _dtype: Any) -> dict[str, Any]:
    import numpy as np

    from tests.train.stores import WIDTHS, noise

    shapes = {name: (512, width) if name == "prompt_embeds" else (width,) for name, width in WIDTHS.items() if "." not in name}
    whole = {name: noise(name, caption, shape=shape) for name, shape in shapes.items() if name in recipe.read["outputs"]}
    return {name: ("BF16", array.shape, (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()) for name, array in whole.items()}


# -------------------------------------------------------------------------------------------------------- what a child reads


class Held:
    """What is open in a parent, and in a child that opens it anew."""

    def __init__(self, folder: str) -> None:
        import torch

        import cachestore as cs

        self.flux, self.sdxl = cs.CachedDataset(f"{folder}/flux"), cs.CachedDataset(f"{folder}/sdxl")
        self.wide = cs.CachedDataset(f"{folder}/flux", dtype=torch.float32)
        self.mixed = cs.MixedDataset([self.flux, self.flux.select([1])], [1, 2])
        self.store = cs.open(f"{folder}/flux")
        self.keys = sorted(self.store.keys())[:3]
        self.through = cs.ReadThrough(self.store)
        self.loader = cs.make_loader(self.flux, batch_size=2, tail="pad", ahead=2)
        self.wide_loader = cs.make_loader(self.wide, batch_size=3, ahead=0, dtype=torch.bfloat16)


READS: Final[Mapping[str, Callable[[Held], Any]]] = {
    "a sample": lambda held: held.flux[1],
    "a sample, joined": lambda held: held.sdxl[1],
    "a sample, cast": lambda held: held.wide[2],
    "samples, collated": lambda held: held.sdxl.collate(held.sdxl.__getitems__(ALL)),
    "a batch": lambda held: held.flux.read_batch(ALL),
    "a batch, joined": lambda held: held.sdxl.read_batch(ALL),
    "a batch, cast, in buffers": lambda held: held.wide.read_batch(ALL, into=held.wide.make_buffers()),
    "a batch of a mix": lambda held: held.mixed.read_batch([0, 1, 3]),
    "samples of a mix": lambda held: held.mixed.collate([held.mixed[0], held.mixed[4]]),
    "a part": lambda held: held.flux.select([2, 0]).read_batch([0, 1]),
    "a prompt": lambda held: held.sdxl.prompt("caption 1"),
    "batches that are prefetched": lambda held: list(_epoch(held.loader)),
    "batches of a loader without threads": lambda held: list(_epoch(held.wide_loader)),
    "an entry": lambda held: held.store.get(held.keys[0]),
    "entries": lambda held: held.store.get_many(held.keys),
    "entries, read through": lambda held: held.through([(key, None) for key in held.keys]),
}


def _epoch(loader: Any) -> Any:
    loader.set_epoch(0)
    return loader


def digest(value: Any) -> str:
    """The digest of tensors and what holds them. Uses no operation of torch on them."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for name in sorted(value):
            found.update(repr(name).encode())
            _feed(found, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(found, one)
    elif hasattr(value, "dtype"):
        import torch

        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    else:
        found.update(repr(value).encode())


# ---------------------------------------------------------------------------------------------------------- ways to fork


def in_fork(act: Callable[[], str]) -> str | None:
    """What a forked child answers; None if it hangs and is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(writing, act)
    os.close(writing)
    with open(reading, "rb") as answers:
        answer = answers.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if code == -signal.SIGALRM else answer or f"ended with {code}"


def _answer(descriptor: int, act: Callable[[], str]) -> None:
    signal.alarm(CHILD_SECONDS)
    code = 1
    try:
        os.write(descriptor, act().encode())
        code = 0
    except BaseException as error:  # noqa: BLE001 - what a child says of itself
        os.write(descriptor, repr(error).encode())
    finally:
        os._exit(code)


def in_fork_of_a_thread(act: Callable[[], str]) -> str | None:
    answers: list[str | None] = []
    forking = threading.Thread(target=lambda: answers.append(in_fork(act)))
    forking.start()
    forking.join()
    return answers[0]


def in_nested_forks(act: Callable[[], str]) -> str | None:
    """The child reads, and so does its child."""

    def reads_and_forks() -> str:
        own, inner = act(), in_fork(act)
        return own if inner == own else f"{own}, and its child: {inner}"

    return in_fork(reads_and_forks)


def in_thread_of_a_fork(act: Callable[[], str]) -> str | None:
    def in_thread() -> str:
        answers: list[str] = []
        reading = threading.Thread(target=lambda: answers.append(act()))
        reading.start()
        reading.join()
        return answers[0]

    return in_fork(in_thread)


def in_fork_that_sets_the_number(act: Callable[[], str]) -> str | None:
    """The child wants threads of torch again, as launchers do, and after it has read too."""

    def reads_twice() -> str:
        import torch

        torch.set_num_threads(THREADS)
        first = act()
        torch.set_num_threads(THREADS - 1)
        second = act()
        assert torch.get_num_threads() == THREADS - 1, torch.get_num_threads()
        return first if first == second else f"{first}, then {second}"

    return in_fork(reads_twice)


def in_fork_that_computes(act: Callable[[], str]) -> str | None:
    """The child computes with torch itself, once it has read."""

    def computes() -> str:
        import torch

        answer = act()
        assert float(torch.ones(1 << 20).exp().sum()) > 0
        return answer

    return in_fork(computes)


def in_process(act: Callable[[], str]) -> str | None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: (signal.alarm(CHILD_SECONDS), queue.put(act())))
    process.start()
    process.join()
    return None if process.exitcode == -signal.SIGALRM else queue.get() if process.exitcode == 0 else f"ended with {process.exitcode}"


_inherited: list[Callable[[], Any]] = []


def _act() -> Any:
    return _inherited[-1]()


def in_pool(act: Callable[[], Any]) -> str | None:
    """A worker of a Pool sends the tensors themselves."""
    _inherited.append(act)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return digest(pool.apply_async(_act).get(CHILD_SECONDS))
        except multiprocessing.TimeoutError:
            return None


FORKS: Final[Sequence[Callable[[Callable[[], Any]], str | None]]] = (
    in_fork,
    in_pool,
    in_nested_forks,
    in_fork_of_a_thread,
    in_process,
    in_thread_of_a_fork,
    in_fork_that_sets_the_number,
    in_fork_that_computes,
)

# --------------------------------------------------------------------------------------------------------------- parents


def _jax() -> None:
    import jax
    import jax.numpy

    assert float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((300, 300)))) == 300.0**3


def _tokenizers() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"caption": 0, "[UNK]": 1}, unk_token="[UNK]")).encode_batch(["caption of a picture"] * 1000)


class Parent(NamedTuple):
    """What a process has done before it forks."""

    has_read: bool = True
    has_computed: bool = True
    """With torch, in threads."""
    begin: Callable[[], None] = lambda: None
    """What gives it other threads."""
    share: int = 1
    """How many of the points are its own, beside the others'."""


PARENTS: Final[Mapping[str, Parent]] = {
    "has read": Parent(share=6),
    "has read, with JAX": Parent(begin=_jax, share=2),
    "has read, with tokenizers": Parent(begin=_tokenizers, share=2),
    "has computed": Parent(has_read=False, share=2),
    "has not imported torch": Parent(has_read=False, has_computed=False),
}


class Told(NamedTuple):
    """What a parent tells."""

    violations: list[str]
    digests: dict[str, str]
    """Of what it read itself, if it did."""
    without: list[str]
    """As `violations`, of the points that were tried without what keeps reading in one thread."""


Points = Sequence[tuple[str, int]]
"""(read, way to fork) of each."""


def be(name: str, folder: str, points: Points, digests: dict[str, str], without: Points = ()) -> Told:
    """Be a parent: fork children that read, and tell which of them hung or read something else."""
    parent, held = PARENTS[name], list[Held]()
    parent.begin()
    if parent.has_read:
        import torch

        torch.set_num_threads(THREADS)
        held.append(Held(folder))
        digests = {one: digest(read(held[0])) for one, read in READS.items()}
    if parent.has_computed:
        _compute()
    assert parent.has_computed == ("torch" in sys.modules)
    assert parent.has_read == ("cachestore.core.forked" in sys.modules)

    def violations_of(points: Points) -> list[str]:
        tried = ((read, FORKS[way], _Act(READS[read], folder, held)) for read, way in points)
        answers = ((read, fork, fork(act if fork is in_pool else act.digest)) for read, fork, act in tried)
        return [
            f"{name}, {fork.__name__}, {read}: {'it hangs' if answer is None else answer[:300]}"
            for read, fork, answer in answers
            if answer != digests[read]
        ]

    violations = violations_of(points)
    if not without:
        return Told(violations, digests, [])
    with patch("cachestore.core.forked._has_torch", lambda: False), patch(f"{__name__}.CHILD_SECONDS", HANG_SECONDS):
        return Told(violations, digests, violations_of(without))


class _Act(NamedTuple):
    read: Callable[[Held], Any]
    folder: str
    held: list[Held]

    def __call__(self) -> Any:
        return self.read(self.held[0] if self.held else Held(self.folder))

    def digest(self) -> str:
        return digest(self())


def _compute() -> None:
    """Let torch start its threads here."""
    import torch

    torch.ones(1 << 20).exp()
    assert len(os.listdir("/proc/self/task")) >= torch.get_num_threads() > 1, "torch has threads, or nothing is tried here"


def start(name: str, folder: Path, points: Points, digests: dict[str, str], without: Points = ()) -> Told:
    """Let a process of its own be a parent."""
    body = json.dumps({"name": name, "folder": str(folder), "points": points, "digests": digests, "without": without})
    surroundings = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.torture.forks"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**surroundings, **own}, start_new_session=True
    )
    limit = 60 + 2 * CHILD_SECONDS * (len(points) + len(without))
    try:
        out, _err = process.communicate(body, timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Told([f"{name}: it did not end within {limit} s"], digests, [])
    return Told(**json.loads(out)) if process.returncode == 0 else Told([f"{name}: it ended with {process.returncode}"], digests, [])


def play(number: int, seed: int) -> Outcome:
    """Fork so many children, of every parent; of one with JAX only where that is installed."""
    chosen = random.Random(seed)
    known = {name: one for name, one in PARENTS.items() if "JAX" not in name or find_spec("jax") is not None}
    turns = [name for name, one in known.items() for _time in range(one.share)]
    points: dict[str, list[tuple[str, int]]] = {name: [] for name in known}
    for point in range(number):
        points[turns[point * 5 % len(turns)]].append((chosen.choice(list(READS)), point % len(FORKS)))
    violations: list[str] = []
    digests: dict[str, str] = {}
    with scratch() as folder:
        build(folder)
        for name, own in points.items():
            if own or not digests:
                told = start(name, folder, own, digests)
                digests = told.digests
                violations += told.violations
    return Outcome(number, tuple(violations), (f"parents: {', '.join(f'{name} ({len(own)})' for name, own in points.items())}",))


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"forks": Campaign(play, 300)}

if __name__ == "__main__":
    print(json.dumps(be(**json.loads(sys.stdin.read()))._asdict()))
