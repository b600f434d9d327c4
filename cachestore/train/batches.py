"""Batches of one bucket each, the same number on every rank."""

import atexit
import inspect
import logging
import threading
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args
from weakref import WeakKeyDictionary

from cachestore.core.arguments import as_mapping, as_switch, as_whole, as_word
from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_parts
from cachestore.core.words import first_of, noun, plural
from cachestore.train import peers
from cachestore.train.callers import Callers, find_callers, refuse_options
from cachestore.train.order import Indices, Order, Tail, count_batches, count_even, even_out, order_batches
from cachestore.train.planned import PlannedBatch
from cachestore.train.seats import Seat, Split, check_dealing, find_seat, numbered_seat, seat_among, seat_in

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_NAMED_BUCKETS: Final = 5
_UPCOMING: Final = 2
"""How many of its next batches a worker of a DataLoader knows."""


class Bucketed(Protocol):
    """What the sampler needs of a data set.

    If it has `set_epoch`, the sampler passes on the epoch. If it has `announce`, the sampler passes the batches of each iteration on this
    process, and holds the returned context during the iteration. So with `reading`, which also gets the batches of all ranks. If it has
    `workers`, and that is not 0, each batch says what the same one of so many workers of a DataLoader gets next. If it has `content`, ranks
    compare that before the first batch, else the digest. If it has `joined`, a saved position has that too.
    """

    @property
    def buckets(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """The indices of the samples of each bucket."""
        ...

    @property
    def digest(self) -> str:
        """Equal for equal samples in the same order."""
        ...


class BucketBatchSampler:
    """A `batch_sampler` for a DataLoader: yields lists of indices into the data set, each a full batch of one bucket.

    The order is a pure function of (seed, epoch). Ranks take turns in it, so they never share a batch and have equally many; a run may
    resume with another number of ranks. A complete iteration is followed by the next epoch, unless `set_epoch` says otherwise. The sampler
    also sets the data set's epoch, so that it draws new latents.

    Alone, or with explicit ranks:         BucketBatchSampler(data, batch_size=8, rank=RANK, num_replicas=WORLD_SIZE)
    With accelerate, which shards itself:  BucketBatchSampler(data, batch_size=8, split="outside")
    With Fabric and Lightning's Trainer:   explicit ranks, and use_distributed_sampler=False

    Before its first batch, and the first one after a state was loaded, ranks compare what they are about to read (`check_ranks`).

    It is deliberately no subclass of torch's BatchSampler, has no `drop_last`, and its `batch_size` is None: otherwise accelerate would
    lose or mix short batches, and Fabric would replace the sampler. Use one sampler for one data set object, in one thread of one process.
    It starts no thread or process.
    """

    def __init__(
        self,
        data: Bucketed,
        batch_size: int = 8,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "drop",
        rank: int | None = None,
        num_replicas: int | None = None,
        split: Split | None = None,
        mesh: object = None,
        check_ranks: bool | None = None,
    ) -> None:
        """Prepare the batches of a data set.

        Args:
            data: a CachedDataset.
            batch_size: samples in each batch, on each rank.
            shuffle: use another order in every epoch; else the data set's order, bucket by bucket.
            seed: the seed of the order.
            tail: what happens to samples that do not fill a batch of their bucket, and to the at most `num_replicas - 1` batches that
                cannot be divided among all ranks. "drop" leaves them out, "pad" repeats them in turn until they fit, "wrap" adds the first
                ones of the bucket (or of the epoch). With "drop" no sample comes twice in an epoch; else each comes at least once.
            rank: the rank of this process; needs `num_replicas`.
            num_replicas: the number of processes that train together.
            split: "outside" yields the batches of all ranks everywhere, a multiple of their number, for accelerate, which splits them.
                "found" takes rank and number from torch.distributed, else from the launcher's environment, whenever the sampler is
                used: for samplers that are made before the trainer starts its ranks.
            mesh: instead of `rank` and `num_replicas`, for ranks that share batches, as in `make_loader`.
            check_ranks: as in `make_loader`.

        Raises:
            BadInput: wrong options; an epoch without a batch, over all ranks; or several processes were found, but neither ranks nor
                `split` were given. The last two are also raised by an iteration, if the ranks are found only then, and that somebody
                else deals the batches too, or nobody does.
            RanksDiffer: by an iteration: the ranks are about to read batches that do not belong together.
        """
        check_buckets(data)
        batch_size, seed = as_whole("batch_size", batch_size, least=1), as_whole("seed", seed, least=0)
        shuffle = as_switch("shuffle", shuffle)
        as_word("tail", tail, get_args(Tail))
        if split is not None:
            as_word("split", split, get_args(Split))
        if mesh is None:
            self._fixed_seat = numbered_seat(rank, num_replicas, split)
        elif rank is None and num_replicas is None:
            seat = seat_in(mesh)
            self._fixed_seat = replace(seat, yields_all=split == "outside" and seat.replicas > 1)
        else:
            raise BadInput("mesh says which batches this rank takes: pass it without rank and num_replicas", option="mesh")
        self._split: Split | None = split
        self._check_ranks = None if check_ranks is None else as_switch("check_ranks", check_ranks)
        self._origin = peers.origin_of(inspect.currentframe())
        self._number = peers.next_number(self._origin)
        self._comparisons = 0
        self._is_compared = False
        """Whether nothing has changed since the ranks were compared but the epoch."""
        self._data = data
        self._order = Order(batch_size, shuffle, seed, tail)
        self._epoch = 0
        self._start = 0
        """Batches of the epoch, over all ranks, before this iteration."""
        self._yielded = 0
        """Batches that this iteration has yielded in this process."""
        self._delivered: int | None = None
        """How many of them reached the trainer, as a prefetching loader reports. None without such a report, or after all did."""
        self._is_finished = False
        """Whether this iteration has yielded all batches. The caller may not have asked for more yet."""
        self._is_over = False
        """Whether the caller has seen the end of the iteration."""
        self._is_resumed = False
        self._epochs_before = 0
        """Added to the epochs that a trainer sets, if it counts from 0 again after it resumed."""
        seat = self._seat
        _refuse_no_batch(data, self._order, seat.replicas)
        if seat.rank == 0:
            _report_left_out(data, self._order, seat.replicas)

    def __len__(self) -> int:
        """Number of batches of a whole epoch on this rank; with `split="outside"`, on all ranks."""
        seat = self._seat
        return count_even(count_batches(self._data.buckets, self._order), seat.replicas, self._order.tail) * (seat.replicas // seat.step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank, for the epoch that was set or resumed, else the next one. Raises BadInput as the class."""
        iteration = self._iterate()
        _iterations[iteration] = threading.current_thread()
        return iteration

    def _iterate(self) -> Generator[list[int]]:
        seat = self._seat
        _refuse_no_batch(self._data, self._order, seat.replicas)
        if self._is_finished:
            self._go_to(self._epoch + 1, 0)
        self._yielded = 0
        self._is_resumed = False
        self._tell_data()
        epoch = self._epoch
        batches = order_batches(self._data.buckets, self._order, epoch)
        rounds = even_out(batches[self._start :], seat.replicas, self._order.tail, whole=batches)
        callers = find_callers(inspect.currentframe())
        check_dealing(callers, seat)
        if not self._is_compared:
            self._compare(callers, seat, rounds)
        ours = rounds[seat.first :: seat.step]  # all that this process yields
        announce: Any = getattr(self._data, "announce", nullcontext)
        reading: Any = getattr(self._data, "reading", None)
        of_rank = rounds[seat.rank :: seat.replicas] if seat.rank is not None else rounds[:0]
        # A worker gets the batches of this rank that are so far apart in `ours`.
        turn = getattr(self._data, "workers", 0) * (seat.replicas // seat.step)
        with nullcontext() if reading is None else reading(rounds, of_rank), announce(of_rank):
            for number, batch in enumerate(ours):
                self._yielded += 1
                # A caller that takes exactly len(sampler) batches never sees the end, but wants the next epoch next.
                self._is_finished = self._yielded == len(ours)
                upcoming = ours[number + turn :: turn][:_UPCOMING].tolist() if turn else ()
                yield PlannedBatch(batch.tolist(), upcoming, epoch=epoch)
        self._is_finished = self._is_over = True

    @property
    def sampler(self) -> "Self":
        """This object, as accelerate and Fabric call `batch_sampler.sampler.set_epoch`. Raises BadInput as `batch_size`."""
        refuse_options(inspect.currentframe())
        return self

    @property
    def batch_size(self) -> None:
        """None, see the class. Raises BadInput if accelerate asks, with options under which batches would be wrong."""
        refuse_options(inspect.currentframe())

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or the one that was set since."""
        return self._epoch

    @property
    def left_out(self) -> int:
        """How many samples the rest of the epoch leaves out, on all ranks. 0 unless `tail="drop"`."""
        if self._order.tail != "drop":
            return 0
        batches = count_batches(self._data.buckets, self._order)
        unbatched = sum(map(len, self._data.buckets.values())) - batches * self._order.size
        return unbatched + max(batches - self._start, 0) % self._seat.replicas * self._order.size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration and of the data set. Setting the same epoch again changes nothing.

        Right after a state was loaded, 0 means the resumed epoch, 1 the one after it, and so on: Fabric and accelerate set the epoch before
        each iteration, and count from 0 in each process.
        """
        if self._is_resumed and epoch == 0 and self._epoch > self._epochs_before:
            self._epochs_before = self._epoch
            _log.info("the trainer's epoch 0 counts as epoch %d, where training resumed", self._epoch)
        epoch = as_whole("epoch", epoch, least=0) + self._epochs_before
        if epoch != self._epoch or self._is_finished:
            if self._is_resumed and self._start:
                left = epoch, self._epoch, plural(self._start, "batch", "batches")
                _log.warning("set_epoch(%d) leaves epoch %d, which was resumed after %s: to finish it, do not set another", *left)
            self._go_to(epoch, 0)
        self._tell_data()

    def resume(self, epoch: int, step: int) -> None:
        """Continue with the rest of an epoch of which each rank has had `step` batches."""
        self._resume_at(as_whole("epoch", epoch, least=0), as_whole("step", step, least=0) * self._seat.replicas)

    def count_delivered(self, batches: int | None) -> None:
        """Set how many batches of this iteration reached the trainer here. None means all, and also the end.

        For loaders that prefetch. Those of `make_loader` call it.
        """
        self._delivered = batches

    def state_dict(self, *, batches_consumed: int | None = None) -> dict[str, Any]:
        """The position of this sampler, as JSON. Any number of ranks can resume from it.

        A DataLoader with workers prefetches, so the sampler's own count is right only without workers, with the loaders of `make_loader`,
        and with torchdata's StatefulDataLoader. With any other loader, and with accelerate, pass `batches_consumed`: how many batches the
        trainer has had in this process since the present iteration began.
        """
        seat = self._seat
        delivered = self._delivered if batches_consumed is None else as_whole("batches_consumed", batches_consumed, least=0)
        if delivered is not None:
            epoch, consumed = self._epoch, self._start + delivered * seat.replicas
        elif self._is_over:
            epoch, consumed = self._epoch + 1, 0
        else:
            epoch, consumed = self._epoch, self._start + self._yielded * seat.step
        return {"epoch": epoch, "consumed": consumed, "digest": self._data.digest, **self._opened(), **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of another sampler. Raises BadInput if that had another data set or another order."""
        as_mapping("state", state, "what the state_dict() of a BucketBatchSampler gave")
        missing = sorted({"epoch", "consumed", "digest", *self._settings()} - set(state))
        if missing:
            lacks = f"it lacks {', '.join(missing)}; pass what state_dict() returned"
            raise BadInput(f"this is not the state of a BucketBatchSampler: {lacks}", option="state")
        if state["digest"] != self._data.digest:
            raise self._other_samples(state)
        for name, ours in self._settings().items():
            if state[name] != ours:
                raise BadInput(
                    f"the {name} was {state[name]!r} when the state was saved, but is {ours!r} now: the saved position means"
                    " nothing in the new order. Pass the same as then, or begin the epoch anew",
                    option=name,
                )
        self._resume_at(*(as_whole(f"{name} of the state", state[name], least=0) for name in ("epoch", "consumed")))

    def _resume_at(self, epoch: int, consumed: int) -> None:
        self._go_to(epoch, consumed)
        self._is_resumed = True
        self._is_compared = False
        self._epochs_before = 0
        self._tell_data()
        seat = self._seat
        batches = count_batches(self._data.buckets, self._order)
        rest = max(batches - consumed, 0) % seat.replicas
        if self._order.tail == "drop" and seat.rank == 0 and rest not in {0, batches % seat.replicas}:
            left = epoch, rest, self._order.size, seat.replicas
            _log.warning(
                "the rest of epoch %d leaves out %d batches of %d samples at its end, which cannot be divided among %d ranks", *left
            )

    def _opened(self) -> dict[str, Any]:
        """The arguments that open the data set as it is, as JSON: its generation and, by name, the joined data sets with theirs."""
        joined: Mapping[str, tuple[str, int]] = getattr(self._data, "joined", {})
        found = {"generation": getattr(self._data, "generation", None), "joined": {name: list(wanted) for name, wanted in joined.items()}}
        return {name: value for name, value in found.items() if value not in (None, {})}

    def _other_samples(self, state: Mapping[str, Any]) -> BadInput:
        """The error for a saved position in a data set with another digest."""
        ours, names = self._opened(), {"joined": "join", "generation": "generation"}
        differing = [name for name in names if state.get(name) != ours.get(name)]
        as_then = " and ".join(f"{names[name]}={state[name]!r}" for name in ("generation", "joined") if name in state)
        now = " and ".join(f"{names[name]}={ours[name]!r}" for name in ("generation", "joined") if name in ours) or "others"
        why = f"the data set had other samples when the state was saved, and a position in it means nothing among those of now ({now})"
        advice = f"open the data set with {as_then}" if differing and as_then else "choose the samples of then (resolution, select, split)"
        return BadInput(f"{why}: {advice}, or begin the epoch anew", option=names[differing[0]] if differing else "state")

    def _settings(self) -> dict[str, Any]:
        return {"seed": self._order.seed, "batch_size": self._order.size, "shuffle": self._order.shuffle, "tail": self._order.tail}

    def _go_to(self, epoch: int, consumed: int) -> None:
        self._epoch, self._start = epoch, consumed
        self._yielded = 0
        self._delivered = None
        self._is_finished = self._is_over = self._is_resumed = False

    @property
    def _seat(self) -> Seat:
        """Found anew at each use, if it was not told: a launcher may set it late. Raises as `find_seat`."""
        return self._fixed_seat or find_seat(self._split)

    def _compare(self, callers: Callers, seat: Seat, rounds: Indices) -> None:
        if self._check_ranks is not False:
            content: Mapping[str, Any] = getattr(self._data, "content", None) or {"digest": self._data.digest}
            common = {f"the data set's {name}": value for name, value in content.items()} | self._settings()
            common |= {"epoch": self._epoch, "batches read before": self._start, "batches to come": len(rounds)}
            dealer = "accelerate" if callers.dealt is not None else "the caller" if seat.yields_all else "each rank itself"
            common |= {"num_replicas": seat.replicas, "dealt by": dealer}
            common |= {"the first batches": digest_parts(rounds[: seat.replicas].tobytes()).hex()}
            turn = f"{self._number}/{self._comparisons}"
            self._comparisons += 1
            about = repr(self._data)
            peers.compare(self._origin, turn, common, seat_among(callers, seat), about, is_required=bool(self._check_ranks))
        self._is_compared = True

    def _tell_data(self) -> None:
        tell = getattr(self._data, "set_epoch", None)
        if tell is not None:
            tell(self._epoch)


_iterations: Final[WeakKeyDictionary[Generator[list[int]], threading.Thread]] = WeakKeyDictionary()
"""Iterations that may still be open, and the thread that began each."""


@atexit.register
def _end_iterations() -> None:
    """End the open iterations before the interpreter ends, as what ends them is gone afterwards. Threads that still iterate go on."""
    for iteration, thread in list(_iterations.items()):
        if thread is threading.current_thread() or not thread.is_alive():
            iteration.close()


def check_buckets(data: object) -> None:
    """Raise BadInput if this is not a data set with buckets."""
    if not hasattr(data, "buckets"):
        help_text = "pass a CachedDataset (for a torch Subset: data.select(part.indices))"
        raise BadInput(f"a {type(data).__name__} has no buckets; {help_text}", option="data")


def _refuse_no_batch(data: Bucketed, order: Order, world: int) -> None:
    """Raise BadInput if an epoch has no batch. Otherwise training would end at once and look complete."""
    if count_even(count_batches(data.buckets, order), world, order.tail):
        return
    sizes = sorted(((len(indices), bucket) for bucket, indices in data.buckets.items() if len(indices)), key=lambda one: (-one[0], one[1]))
    if not sizes:
        raise BadInput("an epoch has no batch: the data set has no samples; add some with `cachestore precompute`")
    each = "" if world == 1 else f" on each of {world} ranks"
    smaller = range(1, order.size)
    most = bisect_left(smaller, 1, key=lambda size: int(sum(count // size for count, _bucket in sizes) < world))
    advice = f"batch_size={most} is the largest that gives one{each}" if most else f"there are fewer samples than the {world} ranks"
    total = sum(count for count, _bucket in sizes)
    raise BadInput(
        f"an epoch has no batch of {order.size}{each}: {plural(total, 'sample is', 'samples are')} in {plural(len(sizes), 'bucket')}"
        f" ({_listed(sizes)}), and a"
        f' batch comes from one bucket; {advice}, or fill batches up with tail="pad" or "wrap"',
        option="batch_size",
    )


def _report_left_out(data: Bucketed, order: Order, world: int) -> None:
    if order.tail != "drop":
        return
    total = sum(map(len, data.buckets.values()))
    rests = [(len(indices) % order.size, bucket) for bucket, indices in sorted(data.buckets.items()) if len(indices) % order.size]
    rest = sum(count for count, _bucket in rests)
    batches = count_batches(data.buckets, order) % world
    reasons: list[str] = []
    if rests:
        reasons.append(f"{rest} that {noun(rest, 'does', 'do')} not fill a batch of {order.size} ({_listed(rests)})")
    if batches:
        reasons.append(f"{batches * order.size} in batches that cannot be divided among {world} ranks")
    if reasons:
        left = rest + batches * order.size
        _log.warning('each epoch leaves out %d of %d samples: %s; tail="pad" or "wrap" keeps them', left, total, ", and ".join(reasons))


def _listed(counts: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    return first_of((f"{count} of {'x'.join(map(str, bucket)) or 'those without a picture'}" for count, bucket in counts), _NAMED_BUCKETS)
