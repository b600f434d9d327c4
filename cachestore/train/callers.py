"""Who takes a sampler's batches: the wrappers of trainers on the call stack, told by the names of their types. Imports none of them."""

from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from cachestore.core.errors import BadInput

_TRANSPARENT: Final = {"cachestore", "torch", "torchdata", "accelerate"}
"""Packages that pass batches on as they are, but for the wrappers that are looked for. Others may deal them to ranks themselves."""
_ASKED: Final = ("torch.utils.data.", "torchdata.", "accelerate.data_loader", "cachestore.train.loader")
"""Beginnings of the modules of DataLoaders and of what wraps batch samplers."""
_PREPARE: Final = "prepare_data_loader", "accelerate.data_loader"
_REFUSED: Final = {
    "split_batches": "it would cut each batch into pieces for the ranks: leave it out, as batch_size is for each rank already",
    "dispatch_batches": "it would read on one rank alone and join batches of several sizes: leave it out, each rank reads its own",
    "use_stateful_dataloader": (
        "its saved state lacks the epoch, so training would go on in the order of another one: leave it out, and save what the"
        " sampler's state_dict(batches_consumed=...) returns"
    ),
}
"""Options of accelerate under which batches would be wrong, each with the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Callers:
    """Who takes the batches of a sampler."""

    dealt: tuple[int, int] | None = None
    """(number of this process, number of processes) of accelerate's wrapper, which deals the batches to processes. None without it."""
    is_direct: bool = False
    """Whether a DataLoader takes all batches that are not dealt. False if unknown, as with a loop or a wrapper of the user's own."""


def find_callers(frame: FrameType | None) -> Callers:
    """Look for who takes the batches, from this frame outwards up to a DataLoader."""
    dealt, is_transparent = None, True
    while frame is not None:
        # Python keeps what `f_locals` gives as long as the frame runs: a trainer's frames, with its models, are never asked.
        owner: Any = frame.f_locals.get("self") if str(frame.f_globals.get("__name__")).startswith(_ASKED) else None
        names = {f"{kind.__module__}.{kind.__name__}" for kind in type(owner).__mro__}
        if "accelerate.data_loader.BatchSamplerShard" in names and owner.num_processes > 1:
            dealt = owner.process_index, owner.num_processes
        if names & {"torch.utils.data.dataloader._BaseDataLoaderIter", "torch.utils.data.dataloader.DataLoader"}:
            return Callers(dealt, is_transparent)
        is_transparent = is_transparent and package_of(frame) in _TRANSPARENT
        frame = frame.f_back
    return Callers(dealt)


def package_of(frame: FrameType) -> str:
    """The name of the package whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def refuse_options(frame: FrameType | None) -> None:
    """Raise BadInput if accelerate's `prepare` asks a property, which runs in this frame, with options under which batches are wrong."""
    for _call in range(3):
        if frame is None:
            return
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == _PREPARE:
            given = frame.f_locals
            for option, reason in _REFUSED.items():
                if given.get(option):
                    raise BadInput(f"accelerate's {option}=True cannot be used with batches of cachestore: {reason} (docs/loading.md)")
            return
        frame = frame.f_back
