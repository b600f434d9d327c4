"""Put samples into a batch: a plain dict of contiguous writable tensors and lists."""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.utils.data._utils.collate import default_collate_fn_map  # pyright: ignore[reportUnknownVariableType] - torch's docs tell to extend it

from cachestore.core.errors import BadInput
from cachestore.core.forked import in_one_thread
from cachestore.core.read_block import TextBlock
from cachestore.train.callers import package_of
from cachestore.train.texts import make_constant, pad_rows

SampleDict = dict[str, Any]
"""One sample: tensors without a batch axis, and plain values, by name."""


class ReadSample(SampleDict):
    """One sample as data sets return it. A dict of its own type, so that torch's `default_collate` can be told to refuse it."""


_ADVICE = "a batch must come from one bucket: give the DataLoader batch_sampler=cachestore.BucketBatchSampler(data, ...)"


@in_one_thread
def collate(samples: Sequence[SampleDict], blocks: Sequence[TextBlock]) -> dict[str, Any]:
    """Put samples into one batch. Stacks or pads tensors; other values become lists, with None for samples without one.

    Raises BadInput for no samples, and for samples that do not fit into one batch.
    """
    if isinstance(samples, Mapping):
        raise BadInput(
            "collate got one sample instead of a list: a library has rebuilt the loader of make_loader with its own sampler. Turn"
            " that off: prepare_data_loader(loader, add_dist_sampler=False), setup_dataloaders(loader,"
            " use_distributed_sampler=False)"
        )
    if not samples:
        raise BadInput("a batch needs at least one sample, but collate got an empty list")
    padding = {name: value for block in blocks for name, value in block.padding.items()}
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample.get(name) for sample in samples]
        if not any(isinstance(value, torch.Tensor) for value in values):
            batch[name] = values
            continue
        lacking = [sample for sample, value in zip(samples, values, strict=True) if not isinstance(value, torch.Tensor)]
        if lacking:
            has = next(sample for sample in samples if isinstance(sample.get(name), torch.Tensor))
            raise BadInput(f"{_named(has)} has {name}, but {_named(lacking[0])} has none; {_ADVICE}")
        rows, wanted = cast("list[torch.Tensor]", values), padding.get(name)
        if wanted is not None:
            batch[name], mask = pad_rows(rows, wanted)
            batch |= {wanted.mask: mask} if wanted.mask is not None else {}
            continue
        for row, sample in zip(rows, samples, strict=True):
            if row.shape != rows[0].shape:
                shapes = f"has the shape {list(rows[0].shape)}, but that of {_named(sample)} has {list(row.shape)}"
                raise BadInput(f"{name} of {_named(samples[0])} {shapes}; {_advice_on_shapes(samples[0], sample)}")
        batch[name] = torch.stack(rows)
    return batch | constants_of(batch, blocks)


def _refuse_default(samples: Sequence[SampleDict], **_registry: object) -> NoReturn:
    """What torch's `default_collate` calls for samples. It would neither pad captions nor make masks, even where it could stack."""
    raise BadInput(
        "torch's own collate cannot make a batch of these samples, as it neither pads captions nor makes masks: call"
        f" cachestore.make_loader(data, batch_size={len(samples)}), or give the DataLoader collate_fn=data.collate and"
        " batch_sampler=cachestore.BucketBatchSampler(data, ...)"
    )


default_collate_fn_map[ReadSample] = _refuse_default


def refuse_foreign_collate(frame: FrameType | None) -> None:
    """Raise BadInput if samples are read, in this frame, for a DataLoader that would make the batch by a collate of transformers.

    That one drops values, and neither pads captions nor makes masks and constants, even where it can stack.
    """
    while frame is not None and package_of(frame) == "cachestore":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.utils.data._utils.fetch":
        return
    makes = getattr(frame.f_locals.get("self"), "collate_fn", None)
    makes = getattr(makes, "data_collator", makes)  # inside what the Trainer removes columns with
    if str(getattr(makes, "__module__", "")).partition(".")[0] == "transformers":
        raise BadInput(
            "a collate of transformers cannot make a batch of these samples: pass data_collator=data.collate and"
            " remove_unused_columns=False to the Trainer, and let its get_train_dataloader return"
            " self.accelerator.prepare(cachestore.make_loader(data, batch_size=...)), as a batch must come from one bucket"
        )


def constants_of(batch: Mapping[str, Any], blocks: Sequence[TextBlock]) -> dict[str, torch.Tensor]:
    """Tensors that belong to a batch but are never stored, such as position ids."""
    constants = ((name, constant) for block in blocks for name, constant in block.constants.items())
    return {name: make_constant(constant, batch[constant.like]) for name, constant in constants if constant.like in batch}


def _advice_on_shapes(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    sizes = [sample["target_size"].tolist() if "target_size" in sample else None for sample in (one, other)]
    published = "a part that was published needs one shape in each bucket: publish it so, or pass batch_size=1"
    if sizes[0] != sizes[1]:
        return _ADVICE
    return published if sizes[0] is not None else f"{_ADVICE}; {published}"


def _named(sample: Mapping[str, Any]) -> str:
    size = sample.get("target_size")
    bucket = f" (bucket {int(size[1])}x{int(size[0])})" if isinstance(size, torch.Tensor) else ""
    return f"sample {sample.get('sample_id')!r}{bucket}"
