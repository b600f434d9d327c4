"""SimpleTuner: files of `torch.save`, text in one folder by the caption's digest, latents in another by the picture's. Opens nothing.

md5(caption)-FAMILY.pt                    text: a dict with a batch axis on sequences; older files a tuple
SUB/sha256(stem).pt, SUB/stem.pt          latents, scaled: a tensor `[C, h, w]`; the second was written before names were digests
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from cachestore.formats.families import SIMPLETUNER, Family, family_of
from cachestore.formats.matching import Matches, Named, Place, View, pictures_of, stem_of
from cachestore.formats.text import POOLED, PROMPT, apart, batched, mask_of, together
from cachestore.formats.value import Contents, Latents, Raw, Text, from_array, is_zero, refuse, reshaped, without_batch
from cachestore.samples import Sample

_TEXT: Final = re.compile(r"(?P<digest>[0-9a-f]{32})-(?P<family>.+)\.pt")
_PREFIX: Final = f"{SIMPLETUNER}."
_WHOLE: Final = "value"
_BOTH: Final = "vae/"
"""Where latents lie in a folder that holds text too, as an export does."""
_TIME_IDS: Final = "time_ids"
_MASKS: Final = "attention_masks"
_TUPLE: Final = (PROMPT, POOLED, _TIME_IDS, _MASKS)
"""What older files hold, by position."""


def is_ours(path: str) -> bool:
    """Whether a file may be of such a cache."""
    return path.endswith(".pt")


def text_name(caption: str, family: Family) -> str:
    """The file of a caption."""
    return f"{_md5(caption)}-{family.written_as(SIMPLETUNER)}.pt"


def _md5(caption: str) -> str:
    return hashlib.md5(caption.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def latents_name(reference: str) -> str:
    """The file of a picture."""
    path = PurePosixPath(reference)
    return str(path.parent / f"{hashlib.sha256(path.stem.encode('utf-8', 'surrogatepass')).hexdigest()}.pt")


def match(paths: Sequence[str], samples: Sequence[Sample], matches: Matches) -> None:
    """Find whose files these are, by the digests of captions and of pictures' names."""
    captions = {_md5(caption): caption for sample in samples for caption in ("", *sample.captions)}
    pictures: dict[str, set[str]] = {}
    for reference in pictures_of(samples):
        for name in (latents_name(reference), f"{stem_of(reference)}.pt"):
            pictures.setdefault(name, set()).add(reference)
    for path in paths:
        named = _TEXT.fullmatch(PurePosixPath(path).name)
        if named is not None:
            caption, family = captions.get(named["digest"]), family_of(SIMPLETUNER, named["family"])
            if caption is not None and family is not None and matches.counts(family):
                matches.take_text(caption, Place(path))
        elif len(references := pictures.get(path, ()) or pictures.get(path.removeprefix(_BOTH), ())) == 1:
            matches.take_latents(next(iter(references)), Place(path))
        elif references:
            matches.remarks.append(f"{path} may be of {' or '.join(sorted(references)[:3])}, so it is nobody's")


def read_latents(contents: Contents, family: Family, place: Place) -> Latents:
    """Latents of one picture. Raises EncodeFailed."""
    name = "latents" if "latents" in contents.tensors else _WHOLE
    if name not in contents.tensors:
        what = f"it has no latents, but {', '.join(sorted(contents.tensors)) or 'nothing'}"
        raise refuse(what)
    raw = contents.tensors[name]
    tensor = _with_frames(raw) if family.has_frames else without_batch("latents", raw, 3)
    others = {_PREFIX + other: value for other, value in contents.tensors.items() if other != name}
    state = family.states[SIMPLETUNER]
    return Latents(tensor, is_scaled=state.is_scaled, kind=state.kind, others=others, facts=place.facts)


def _with_frames(raw: Raw) -> Raw:
    """`[C, F, h, w]`, of a single frame also `[C, h, w]`."""
    return reshaped(raw, (raw[1][0], 1, *raw[1][1:])) if len(raw[1]) == 3 else without_batch("latents", raw, 4)


def read_text(contents: Contents, family: Family, place: Place) -> Text:
    """Text of one caption. Raises EncodeFailed."""
    del place
    tensors: dict[str, Raw] = {_by_position(name): raw for name, raw in contents.tensors.items()}
    if PROMPT not in tensors or POOLED not in tensors:
        what = f"it has no {PROMPT} with {POOLED}, but {', '.join(sorted(tensors)) or 'nothing'}"
        raise refuse(what)
    prompt = without_batch(PROMPT, tensors.pop(PROMPT), 2)
    pooled = without_batch(POOLED, tensors.pop(POOLED), 1)
    ids = tensors.pop(_TIME_IDS, None)
    if ids is not None and not is_zero(ids):
        what = f"its {_TIME_IDS} are not zeros"
        raise refuse(what)
    return Text(apart(family, prompt, pooled), {_PREFIX + name: raw for name, raw in tensors.items()})


def _by_position(name: str) -> str:
    return _TUPLE[int(name)] if name.isdecimal() and int(name) < len(_TUPLE) else name


def latents_file(family: Family, views: Sequence[View]) -> tuple[str, Contents]:
    """Name and contents of a picture's latents."""
    del family
    return f"{_BOTH}{latents_name(views[0].named.reference)}", Contents({_WHOLE: views[0].latents.tensor})


def text_file(family: Family, named: Named, text: Text) -> tuple[str, Contents]:
    """Name and contents of a caption's text."""
    prompt, pooled = together(family, text.tensors)
    made = {PROMPT: batched(prompt), POOLED: pooled}
    if family.name == "flux":
        length = prompt[1][0]
        made[_TIME_IDS] = from_array(np.zeros((1, length, 3), np.float32))
        own = text.others.get(_PREFIX + _MASKS)
        made[_MASKS] = own if own is not None else batched(mask_of(text, length, named.tokens))
    return f"text/{text_name(named.caption, family)}", Contents(made)


def side_data(rows: Sequence[tuple[str, Named]], name: str) -> Mapping[str, object]:
    """The two JSON files by which SimpleTuner knows sizes and crops, by their names. `rows` are (absolute path, picture)."""
    known: dict[str, object] = {}
    buckets: dict[str, list[str]] = {}
    for path, named in rows:
        if named.size is None or named.bucket is None or named.resized is None or named.crop is None:
            continue
        ratio = round(named.bucket[0] / named.bucket[1], 2)
        known[path] = {
            "original_size": list(named.size),
            "intermediary_size": list(named.resized),
            "target_size": list(named.bucket),
            "crop_coordinates": [named.crop[1], named.crop[0]],
            "aspect_ratio": ratio,
        }
        buckets.setdefault(str(ratio), []).append(path)
    indices = {"config": {}, "aspect_ratio_bucket_indices": buckets}
    return {f"aspect_ratio_bucket_metadata_{name}.json": known, f"aspect_ratio_bucket_indices_{name}.json": indices}
