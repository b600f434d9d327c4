"""The model that imported values are said to come from: its recipe, and the comparison of the values with what it makes.

Another trainer resizes pictures with other code and draws its own sample. So latents are compared loosely: only those of another
picture count as different.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestore.core.batch_shapes import folded_shape
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Json, Key, Recipe, digest_bytes, digest_opened
from cachestore.core.raw_tensors import FLOATS, Raw, Scale, as_array, cast, folded, from_array, numbers, to_state
from cachestore.core.samples import IMAGE, VIDEO
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder, Prepared, Read, Resolved, Result
from cachestore.encode.pictures.buckets import CropBox, Size
from cachestore.encode.pictures.clips import Clip, as_rate
from cachestore.jobs.plan.encoders import encoders_of
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.store.format.catalog import IMPORTED

if TYPE_CHECKING:
    from cachestore.encode.pictures.shots import Footage
    from cachestore.encode.pictures.variants import Variant

Compare = Callable[[Mapping[str, Raw], Mapping[str, Raw]], str | None]
"""Describes how one entry differs from another; None if it does not."""

FAR: Final = 0.5
"""Latents farther than this from what the declared VAE makes are of another picture. Relative, after its variance is subtracted."""
_SPREAD: Final = 1.5
"""The squared noise of a sample may be this many times its expected value; with thousands of numbers it is within a few percent."""
_PATCH: Final = 2
"""FLUX.2's denoiser takes 2 x 2 neighbours as channels, and its scaled latents have this form."""
_LOGVAR_LEAST, _LOGVAR_MOST = -30.0, 20.0
_RESAMPLE: Final = "pillow"
"""How pictures are resized that imported values are compared with: any torch will do."""


def is_imported(recipe: Recipe) -> bool:
    """Return whether a recipe's values came from another trainer's cache."""
    return recipe.make.get("kind") == IMPORTED


def as_made(hints: Mapping[str, Json], encoder: str, *, store: str) -> PrecomputeRequest:
    """Return the request that would encode the values of an import for one encoder. Raises BadInput if no model was declared."""
    model = hints.get("model")
    if model is None:
        declared = dict(hints.get("claims", {}))
        how = f"it was imported with declared settings ({declared}) but without a model"
        raise BadInput(f"{how}: pass {option('model')} with the model that made it", option="model")
    arguments: Mapping[str, Json] = hints.get("encode_arg", {}) if encoder == "text" else {}
    data, vae, text_encoder = str(hints["data"]), hints.get("vae"), hints.get("text_encoder")
    return PrecomputeRequest(
        data, str(model), store, (encoder,), vae=vae, text_encoder=text_encoder, encode_arg=arguments, resample=_RESAMPLE
    )


def declared_encoder(
    recipe: Recipe, hints: Mapping[str, Json], known: MutableMapping[str, str], *, store: str
) -> tuple["DeclaredEncoder", Mapping[str, Json] | None]:
    """Return the encoder of the declared model for an imported recipe, and the declared `make` block or None.

    Loads no weights. Raises BadInput if no model was declared or it cannot be used.
    """
    made = encoders_of(as_made(hints, recipe.encoder, store=store), known)
    declared: Mapping[str, Json] = recipe.make.get("claimed", {})
    return DeclaredEncoder(made[0], recipe), declared.get("recipe")


def _variant(size: Size, bucket: Size, request: Mapping[str, Json]) -> "Variant":
    """How a picture was cropped, by the catalog; at the centre if the catalog has no crop or an impossible one."""
    from cachestore.encode.pictures.variants import Variant

    resized: Sequence[int] = request.get("resized", ())
    crop: Sequence[int] = request.get("crop", ())
    if len(resized) != 2 or len(crop) != 4:
        return Variant.centred(size, bucket)
    left, top, right, bottom = crop
    if (right - left, bottom - top) != tuple(bucket) or right > resized[0] or bottom > resized[1]:
        return Variant.centred(size, bucket)
    return Variant(size, bucket, CropBox(Size(*resized), (left, top, right, bottom)), is_flipped=False, crop_number=None)


def _footage(request: Mapping[str, Json], read: Read, bucket: Size) -> tuple[str, "Footage"]:
    """Return a video's digest and the clip of it that the catalog describes. Raises EncodeFailed, OSError."""
    from cachestore.encode.pictures import videos
    from cachestore.encode.pictures.shots import Footage

    with read.open(str(request[VIDEO])) as file:
        digest = digest_opened(file)
        video = videos.measure(file)
    rate, start, frames = as_rate(request["fps"]) if "fps" in request else None, int(request["start"][0]), int(request["bucket"][2])
    clip = Clip(_variant(video.size, bucket, request), frames, start, rate, video.rate)
    return digest, Footage(read, str(request[VIDEO]), clip, tuple(video.timeline.take(rate, start, frames)), _RESAMPLE)


@dataclass(slots=True)
class DeclaredEncoder:
    """Encodes imported values again. Implements `unit.Encoder`.

    A request has the entry's `key` and its `caption`, `image` or `video`. For the last two it also has the `bucket` and, if they are
    known, the size to which it was `resized` and its `crop` box; for a video also its `start`.
    """

    encoder: Encoder
    recipe: Recipe
    """The imported recipe."""

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Return an entry's input with the key from the request. Raises EncodeFailed, OSError."""
        key = Key.parse(request["key"])
        if "caption" in request:
            return replace(self.encoder.resolve({"caption": request["caption"]}, read), key=key)
        if len(request.get("bucket", ())) < 2:
            raise EncodeFailed("the catalog does not say at which resolution it was encoded; run `cachestore import` again")
        from cachestore.encode.pictures import images
        from cachestore.encode.pictures.shots import Still

        bucket = Size(*map(int, request["bucket"][:2]))
        if VIDEO in request:
            digest, shot = _footage(request, read, bucket)
            return Resolved(key, shot, {VIDEO: digest}, {"input_digest": digest})
        data = read(str(request["image"]))
        digest = digest_bytes(data)
        shot = Still(data, _variant(images.measure(data), bucket, request), _RESAMPLE)
        return Resolved(key, shot, {str(request.get("role", IMAGE)): digest}, {"input_digest": digest})

    def prepare(self, resolved: Resolved) -> Prepared:
        """Call `encoder.prepare`."""
        return self.encoder.prepare(resolved)

    @property
    def window(self) -> int:
        """The window of `encoder`."""
        return self.encoder.window

    def batch_limit(self, group: Hashable) -> int:
        """Call `encoder.batch_limit`."""
        return self.encoder.batch_limit(group)

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Call `encoder.submit`."""
        return self.encoder.submit(batch)

    def close(self) -> None:
        """Call `encoder.close`, which releases its memory."""
        self.encoder.close()


def find_declared_difference(recipe: Recipe, stored: Mapping[str, Raw], made: Mapping[str, Raw], compare: Compare) -> str | None:
    """Describe how an imported entry differs from what the declared model makes; None if it does not.

    Text tensors are converted to the coarser of the two dtypes and passed to `compare`; further tensors of the trainer's file are ignored.
    Latents are compared loosely, as the module's docstring says.
    """
    if recipe.encoder != "text":
        return _latents_difference(recipe, stored, made)
    own = {name: stored[name] for name in recipe.make["outputs"] if name in stored}
    pairs = {name: _alike(own[name], made[name]) for name in own.keys() & made.keys()}
    ours, theirs = ({name: pair[side] for name, pair in pairs.items()} for side in range(2))
    return compare({**own, **ours}, {**made, **theirs})


def _alike(one: Raw, other: Raw) -> tuple[Raw, Raw]:
    """Two tensors in the coarser of their floating-point dtypes."""
    order = ("BF16", "F16", "F32", "F64")
    if one[0] not in FLOATS or other[0] not in FLOATS:
        return one, other
    dtype = min(one[0], other[0], key=order.index)
    return cast(one, dtype), cast(other, dtype)


def _latents_difference(recipe: Recipe, stored: Mapping[str, Raw], made: Mapping[str, Raw]) -> str | None:
    kind = str(recipe.read["stored"])
    if kind not in stored:
        return f"{kind} is not stored"
    was_scaled = bool(recipe.read.get("scaled", False))
    latents = numbers(to_state(stored[kind], Scale.of(recipe.read), was_scaled=was_scaled, is_scaled=False)).astype(np.float64)
    mean, deviation = _mean_and_deviation(made)
    if was_scaled and latents.shape == folded_shape(mean.shape, _PATCH):
        mean, deviation = (as_array(folded(from_array(one), _PATCH)) for one in (mean, deviation))
    if latents.shape != mean.shape:
        return f"{kind} is {list(latents.shape)}, but the declared VAE makes {list(mean.shape)}"
    noise = _SPREAD * float(np.square(deviation).sum()) if kind == "sample" else 0.0
    length = max(float(np.linalg.norm(mean)), float(np.linalg.norm(latents)))
    distance = sqrt(max(0.0, float(np.square(latents - mean).sum()) - noise))
    if distance > FAR * length:
        far = f"{distance / length:.2g} of its length from what the declared VAE makes"
        return f"{kind} is {far} (another trainer's resizing stays below {FAR})"
    return None


def _mean_and_deviation(made: Mapping[str, Raw]) -> tuple[Any, Any]:
    """Mean and standard deviation as float64 arrays; a mean without moments has deviation 0."""
    if "moments" not in made:
        mean = numbers(next(iter(made.values()))).astype(np.float64)
        return mean, np.zeros_like(mean)
    mean, logvar = np.split(numbers(made["moments"]).astype(np.float64), 2)
    return mean, np.exp(0.5 * np.clip(logvar, _LOGVAR_LEAST, _LOGVAR_MOST))
