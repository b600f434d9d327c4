"""The encoder of pictures and videos: from bytes to a bucket and a key, to pixels, to the VAE's raw output. `vae` has what needs torch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from cachestore.core.errors import BadInput
from cachestore.core.inputs import OWN, Buckets
from cachestore.core.keys import Json, Key, Recipe, input_key
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Prepared, Read, Resolved, Result
from cachestore.encode.families.resamplers import RESAMPLERS, Resample, check_resampler
from cachestore.encode.models.setup import LatentsSetup
from cachestore.encode.pictures.bucket_rules import RULES, STEP, BucketSettings
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.clips import Shape, check_frames
from cachestore.encode.pictures.kinds import Kind
from cachestore.encode.pictures.shots import Examined, Shot

if TYPE_CHECKING:
    from cachestore.encode.batching.budget import Budget
    from cachestore.encode.pictures.vae import Vae

WINDOW = 32
"""How many decoded pictures may wait for their batches, if no batch size is given."""


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
        kind: Kind | None = None,
        device: str = "auto",
        batch_size: int | Literal["auto"] = "auto",
        compiles: bool = False,
    ) -> None:
        self.recipe = recipe
        self.setup = setup
        self.kind = kind or Kind()
        self._fingerprint = recipe.fingerprint
        self._device = device
        self._batch_size: int | Literal["auto"] = batch_size
        self._compiles = compiles
        self._vae: Vae | None = None
        self._budget: Budget | None = None
        self._is_checked = False
        """Whether the resampler is known to work here. Reading the installed version takes 1.5 ms."""

    def resampled(self, name: Resample) -> "LatentsEncoder":
        """Return this encoder for pictures and videos that are resized in the named way. Its recipe and all keys differ."""
        return self._changed(resampled_recipe(self.recipe, name), replace(self.setup, resample=name), self.kind)

    def of_condition(self, name: str, kind: Kind) -> "LatentsEncoder":
        """Return the encoder of a condition of this name, by the same VAE."""
        recipe = kind.recipe(name, self.recipe)
        return self._changed(recipe, kind.setup(self.setup, recipe.read), kind)

    def _changed(self, recipe: Recipe, setup: LatentsSetup, kind: Kind) -> "LatentsEncoder":
        return LatentsEncoder(recipe, setup, kind=kind, device=self._device, batch_size=self._batch_size, compiles=self._compiles)

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Read a picture, digest its bytes, and find its bucket from the header. Raises EncodeFailed if it is no picture.

        For a video, all packets are read to find the times of its frames, but only the first frame is decoded.
        """
        self._check_step(int(request.get("step", STEP)))
        if "frames" in request:
            check_frames(request["frames"], self.setup.temporal_factor)
        examined = self.kind.read_files(request, read, self.setup.resample)
        return resolved_from(examined, self.recipe.encoder, self._fingerprint)

    def check_buckets(self, settings: BucketSettings, buckets: Buckets = OWN) -> None:
        """Raise BadInput if there are no buckets with these settings, or the VAE cannot take them."""
        self._check_step(settings.step)
        square = RULES[buckets].bucket(Size(settings.resolution, settings.resolution), settings)
        if square.width % self.setup.multiple:
            raise BadInput(
                f"{option('buckets', buckets)} at resolution {settings.resolution} does not suit this VAE: use a multiple of"
                f" {self.setup.multiple}",
                option="resolution",
            )

    def _check_step(self, step: int) -> None:
        if step % self.setup.multiple:
            raise BadInput(
                f"{option('bucket_step', step)} does not suit this VAE: it must be a multiple of {self.setup.multiple}",
                option="bucket_step",
            )

    def prepare(self, resolved: Resolved) -> Prepared:
        """Decode, scale and crop, as `Shot.pixels`. The group is the bucket."""
        if not self._is_checked:
            check_resampler(self.setup.resample)
            self._is_checked = True
        shot: Shot = resolved.item
        return Prepared(shot.pixels(), shot.bucket, cost=prod(shot.bucket))

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
        from cachestore.encode.models import modules
        from cachestore.encode.pictures import vae

        if self._budget is None:
            self._budget = vae.latents_budget(self.setup.dtype, modules.choose_device(self._device))
        return self._budget.units(prod(group) if isinstance(group, Size | Shape) else STEP * STEP)

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, pixels) pairs of one bucket. The result raises EncodeFailed if latents are unusable, such as NaN."""
        if not batch:
            return dict
        if self._vae is None:
            from cachestore.encode.models import modules
            from cachestore.encode.pictures import vae

            self._vae = vae.Vae(self.setup, modules.choose_device(self._device), compiles=self._compiles)
        if self._budget is None:
            return self._vae.submit(batch)
        with self._budget.spending(len(batch)):
            return self._vae.submit(batch, partial(self._budget.took, len(batch), prod(batch[0][1].shape[:-1])))

    def close(self) -> None:
        """Release the VAE's memory."""
        if self._vae is not None:
            self._vae = None
            from cachestore.encode.models import modules

            modules.free_memory()

    def entry_bytes(self, bucket: Size, frames: int = 1) -> int:
        """Return the bytes of one entry's tensors at this bucket, for estimates before encoding."""
        channels = self.setup.channels * (2 if self.setup.stored == "moments" else 1)
        width, height = bucket.width // self.setup.factor, bucket.height // self.setup.factor
        latent_frames = 1 if self.setup.is_of_pictures else (frames - 1) // self.setup.temporal_factor + 1
        return latent_frames * width * height * (channels * (4 if self.setup.dtype == "float32" else 2) + -(-self.setup.mask_channels // 8))


def resampled_recipe(recipe: Recipe, name: Resample) -> Recipe:
    """Return the recipe for pictures that are resized in the named way."""
    return replace(recipe, make={**recipe.make, "transform": {**recipe.make["transform"], "pixels": RESAMPLERS[name].pictures}})


def resolved_from(examined: Examined[Shot], encoder: str, fingerprint: str) -> Resolved:
    """Return a unit whose files were examined, with its key."""
    described = {name: value for name, value in examined.transform.items() if value not in ("center", None)}
    digest = next(iter(examined.keyed.values())) if len(examined.keyed) == 1 else dict(examined.keyed)
    meta: dict[str, Json] = {"input_digest": digest, "encoder": encoder, **described}
    return Resolved(input_key(fingerprint, examined.keyed, examined.transform), examined.shot, examined.inputs, meta, examined.facts)
