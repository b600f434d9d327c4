"""The encoder of pictures and videos: from bytes to a bucket and a key, to pixels, to the VAE's raw output. `vae` has what needs torch."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal

from cachestore.core.errors import BadInput
from cachestore.core.inputs import LIKE, OWN, Buckets
from cachestore.core.keys import Json, Key, Recipe, digest_bytes, digest_opened, input_key
from cachestore.core.samples import IMAGE, VIDEO
from cachestore.encode import images
from cachestore.encode.bucket_rules import RULES, STEP, BucketSettings
from cachestore.encode.buckets import Size
from cachestore.encode.clips import Clip, Shape, check_frames, clip_of
from cachestore.encode.resamplers import RESAMPLERS, Resample, check_resampler
from cachestore.encode.resizing import fit, mirror
from cachestore.encode.setup import LatentsSetup
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.encode.variants import variant_of

if TYPE_CHECKING:
    from cachestore.encode.budget import Budget
    from cachestore.encode.vae import Vae

_CHANNELS: Final = 3
WINDOW = 32
"""How many decoded pictures may wait for their batches, if no batch size is given."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Footage:
    """A clip, and how to read its video, whose bytes may be gigabytes."""

    read: Read
    reference: str
    clip: Clip
    times: tuple[int, ...]
    """When each frame of the clip is shown, in ticks of the file."""


class LatentsEncoder:
    """Implements `unit.Encoder` for pictures and videos.

    A request is `{"image": REF, "role": "image", "resolution": 1024, "step": 64}`, or `{"video": REF, ..., "frames": [17, 49, 81]}`.
    `cachestore.core.inputs` lists the other fields. A drawn crop depends on the digest of the picture, or of the one in `"like"`.
    """

    def __init__(
        self,
        recipe: Recipe,
        setup: LatentsSetup,
        *,
        device: str = "auto",
        batch_size: int | Literal["auto"] = "auto",
        compiles: bool = False,
    ) -> None:
        self.recipe = recipe
        self.setup = setup
        self._device = device
        self._batch_size: int | Literal["auto"] = batch_size
        self._compiles = compiles
        self._fingerprint = recipe.fingerprint
        self._vae: Vae | None = None
        self._budget: Budget | None = None
        self._is_checked = False
        """Whether the resampler is known to work here. Reading the installed version takes 1.5 ms."""
        self._has_warned = False
        """Whether the warning about high dynamic range was logged."""

    def resampled(self, name: Resample) -> "LatentsEncoder":
        """Return this encoder for pictures and videos that are resized in the named way. Its recipe and all keys differ."""
        transform = {**self.recipe.make["transform"], "pixels": RESAMPLERS[name].pictures}
        recipe = replace(self.recipe, make={**self.recipe.make, "transform": transform})
        setup = replace(self.setup, resample=name)
        return LatentsEncoder(recipe, setup, device=self._device, batch_size=self._batch_size, compiles=self._compiles)

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Read a picture, digest its bytes, and find its bucket from the header. Raises EncodeFailed if it is no picture.

        For a video, all packets are read to find the times of its frames, but only the first frame is decoded.
        """
        self._check_step(int(request.get("step", STEP)))
        if VIDEO in request:
            return self._resolve_video(request, read)
        role = str(request.get("role", IMAGE))
        data = read(str(request["image"]))
        digest = digest_bytes(data)
        inputs = {role: digest}
        if LIKE in request:
            inputs[IMAGE] = digest_bytes(read(str(request[LIKE])))
        variant = variant_of(request, images.measure(data), inputs.get(IMAGE, digest))
        # the role is not part of the key: a picture that is both image and control is encoded once
        key, meta = self._key_and_meta("image", digest, variant.transform())
        return Resolved(key, (data, variant), inputs, meta, variant.facts())

    def _key_and_meta(self, kind: str, digest: str, transform: Mapping[str, Json]) -> tuple[Key, dict[str, Json]]:
        facts = {name: value for name, value in transform.items() if value not in ("center", None)}
        return input_key(self._fingerprint, {kind: digest}, transform), {"input_digest": digest, "encoder": self.recipe.encoder, **facts}

    def check_buckets(self, resolution: int, step: int, buckets: Buckets = OWN) -> None:
        """Raise BadInput if there are no buckets of this resolution and step, or the VAE cannot take them."""
        self._check_step(step)
        square = RULES[buckets].bucket(Size(resolution, resolution), BucketSettings(resolution, step))
        if square.width % self.setup.multiple:
            raise BadInput(
                f"--buckets {buckets} at resolution {resolution} does not suit this VAE: use a multiple of {self.setup.multiple}"
            )

    def _check_step(self, step: int) -> None:
        if step % self.setup.multiple:
            raise BadInput(f"--bucket-step {step} does not suit this VAE: it must be a multiple of {self.setup.multiple}")

    def _resolve_video(self, request: Mapping[str, Json], read: Read) -> Resolved:
        from cachestore.encode import videos

        check_frames(request["frames"], self.setup.temporal_factor)
        reference = str(request[VIDEO])
        with read.open(reference) as file:
            digest = digest_opened(file)
            video = videos.look(file)
        frames, start, rate = clip_of(request, video.timeline)
        clip = Clip(variant_of(request, video.size, digest), frames, start, rate, video.rate)
        key, meta = self._key_and_meta(VIDEO, digest, clip.transform() | {"pixels": RESAMPLERS[self.setup.resample].videos})
        meta |= {"transfer": video.transfer} if video.transfer else {}
        if video.transfer and not self._has_warned:
            self._has_warned = True
            text = "%s has high dynamic range (%s). It is not tone-mapped, so it looks pale; each such entry records this in `transfer`"
            _log.warning(text, reference, video.transfer)
        footage = _Footage(read, reference, clip, tuple(video.timeline.take(rate, start, frames)))
        return Resolved(key, footage, {VIDEO: digest}, meta, clip.facts())

    def prepare(self, resolved: Resolved) -> Prepared:
        """Decode, scale and crop: uint8 [height, width, 3], or [frames, height, width, 3] for a clip. The group is the bucket."""
        resample = self.setup.resample
        if not self._is_checked:
            check_resampler(resample)
            self._is_checked = True
        if isinstance(footage := resolved.item, _Footage):
            from cachestore.encode import videos

            variant, bucket = footage.clip.variant, footage.clip.shape
            with footage.read.open(footage.reference) as file:
                pixels = videos.take(file, footage.times, variant.bucket, variant.box, resample)
        else:
            data, variant = resolved.item
            bucket, picture = variant.bucket, images.decode_picture(data)
            picture = picture if variant.within is None else images.cut_out(picture, variant.within)
            pixels = fit(picture, bucket, variant.box, resample)
        return Prepared(mirror(pixels) if variant.is_flipped else pixels, bucket, cost=prod(bucket))

    @property
    def window(self) -> int:
        """Two batches, at least WINDOW; a picture takes 3 MB at 1024 x 1024. Does not depend on the device, so torch is not needed."""
        return max(WINDOW, 2 * self._batch_size) if isinstance(self._batch_size, int) else WINDOW

    def batch_limit(self, group: Hashable) -> int:
        """Return how many pictures of a bucket go into one batch at most."""
        if self._vae is not None and self._vae.is_single:
            return 1
        if isinstance(self._batch_size, int):
            return self._batch_size
        from cachestore.encode import modules, vae

        if self._budget is None:
            self._budget = vae.latents_budget(self.setup.dtype, modules.choose_device(self._device))
        return self._budget.units(prod(group) if isinstance(group, Size | Shape) else STEP * STEP)

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, pixels) pairs of one bucket. The result raises EncodeFailed if latents are unusable, such as NaN."""
        if not batch:
            return dict
        if self._vae is None:
            from cachestore.encode import modules, vae

            self._vae = vae.Vae(self.setup, modules.choose_device(self._device), compiles=self._compiles)
        pixels = batch[0][1].size // _CHANNELS
        with nullcontext() if self._budget is None else self._budget.spending(len(batch)):
            return self._vae.submit(batch, partial(self._took, len(batch) * pixels))

    def encode(self, batch: Sequence[tuple[Key, Any]]) -> Mapping[Key, Mapping[str, Any]]:
        """Encode as `submit`, and wait for the result."""
        return self.submit(batch)()

    def _took(self, pixels: int, seconds: float) -> None:
        if self._budget is not None:
            self._budget.took(pixels, seconds)

    def close(self) -> None:
        """Release the VAE's memory."""
        if self._vae is not None:
            self._vae = None
            from cachestore.encode import modules

            modules.free_memory()

    def entry_bytes(self, bucket: Size, frames: int = 1) -> int:
        """Return the bytes of one entry's tensors at this bucket, for estimates before encoding."""
        channels = self.setup.channels * (2 if self.setup.stored == "moments" else 1)
        width, height = bucket.width // self.setup.factor, bucket.height // self.setup.factor
        latent_frames = (frames - 1) // self.setup.temporal_factor + 1
        return channels * latent_frames * width * height * (4 if self.setup.dtype == "float32" else 2)
