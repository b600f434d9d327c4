"""What must be set in a trainer's configuration so that it takes the files of an export and encodes nothing, as lines to copy."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachestore.core.inputs import RESOLUTIONS, sides_each
from cachestore.core.samples import IMAGE
from cachestore.core.spelling import option
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.export_use import TrainerUse
from cachestore.trainers.exported import Block
from cachestore.trainers.learned_buckets import learned_buckets


def trainer_settings(use: TrainerUse) -> list[str]:
    """Return the lines, by the settings of the data set; and that none are enough, if the trainer will not take all latents."""
    blocks = list(_blocks(use.layout, use.folder))
    lines = use.layout.writing.settings(blocks) if blocks else []
    trainer = use.layout.format.name
    apart = [block for block in blocks if use.layout.format.is_beside and Path(block.folder) != Path(block.data)]
    lines += [f"# {trainer} looks beside the pictures: {block.folder} must hold those of {block.data} too" for block in apart]
    if any(block.buckets is None and block.family is not None for block in blocks):
        lines.append(
            f"# resolution and buckets: as in the configuration with which {trainer} made these latents; no other settings give them"
        )
    elif next(use.torn_or_missed(), None) is not None:
        again = f"precompute with {option('buckets', trainer)}, under another {option('name')}"
        lines.append(f"# no settings of {trainer} give all these buckets: {again}")
    return lines


def _blocks(layout: ExportLayout, folder: Path) -> Iterator[Block]:
    for source in layout.roots or ("",):
        for column in layout.visuals or (None,):
            tree = f"{source}/" if column is None and source else "" if column is None else layout.tree_of(source, column)
            options: Mapping[str, Any] = {} if column is None else column.options
            if column is None:
                buckets = None
            elif "resolution" in options:
                buckets = BucketSettings.of(options, options.get(RESOLUTIONS, {}).get(source))
            else:
                buckets = learned_buckets(column, layout.catalog.recipes[column.fingerprint])
            yield Block(
                "-".join([layout.catalog.name, *(part for part in tree.split("/") if part)]),
                str(layout.root_of(source)),
                str(folder / tree),
                str(folder),
                IMAGE if column is None else column.role,
                None if column is None else layout.family_of[column.encoder],
                buckets,
                has_text=layout.captions is not None,
                has_flips=sides_each(options) > 1 and "flips" not in layout.leave_out,
                has_masks=any(len(one.keys) for one in layout.masks),
                frames=tuple(options.get("frames", ())),
            )
