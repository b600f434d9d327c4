"""Call a VAE's encoder. Imports torch. Raw latents are stored, so a wrong scale or shift never makes encoding again necessary."""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cachestore.core.keys import Key
from cachestore.core.read_block import MASK_BITS
from cachestore.encode.batching.budget import Budget
from cachestore.encode.batching.compiling import Compiling
from cachestore.encode.batching.outputs import Entries, Made, difference, fetch, make_sound, tolerance
from cachestore.encode.batching.torch_threads import keep_number
from cachestore.encode.batching.transfer import Took, Transfer, ignore
from cachestore.encode.batching.unit import Result
from cachestore.encode.models.modules import DTYPES, Foreign, load_module
from cachestore.encode.models.setup import LatentsSetup
from cachestore.encode.pictures.causal import frame_by_frame
from cachestore.encode.pictures.kinds import COVERED, GIVEN, IN_FRONT, THRESHOLD

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""[B, H, W, 3], or [H, W, 3] of a single picture; for videos [B, F, H, W, 3] or [F, H, W, 3]."""
Pictures = Sequence[tuple[Key, Pixels]]
CPU_PIXELS, CPU_MOST = 64 * 64 * 16, 16
"""Pixels and pictures of a batch on a CPU. Larger ones help only tiny pictures (1.6x at 64 x 64); at 256 x 256 they exceed the cache."""
GPU_BYTES_PER_PIXEL, GPU_MOST = 2_800, 32
"""Bytes per pixel of a VAE encoder's activations in 16 bits, about 2.8 GB at 1024 x 1024 (32 bits: twice that); the most pictures."""
GPU_FRACTION = 0.6
"""The part of a GPU's free memory that the largest batch may take by that estimate."""
FIRST_DIVISOR = 8
"""On a GPU the first batch is the largest one divided by this. The size doubles while that is faster."""
_COLOURS = 3
_OF_VIDEO = 4
"""The number of dimensions of one clip's pixels, and of a batch of pictures."""
PROBE_SIDE = 64
"""The shortest side of the pictures with which a VAE is probed. They have at least four latent patches a side."""
_log = logging.getLogger(__name__)


def latents_budget(dtype: str, device: torch.device) -> Budget:
    """Return the batch size to begin with and the largest one, in pixels."""
    if device.type != "cuda":
        return Budget(CPU_PIXELS, CPU_PIXELS, CPU_MOST)
    free, _ = torch.cuda.mem_get_info(device)
    most = int(free * GPU_FRACTION) // (GPU_BYTES_PER_PIXEL * (2 if dtype == "float32" else 1))
    return Budget(max(1, most // FIRST_DIVISOR), max(1, most), GPU_MOST)


class Vae:
    """A loaded VAE. Use it from one thread."""

    def __init__(self, setup: LatentsSetup, device: torch.device, *, compiles: bool = False) -> None:
        """Load the VAE onto the device, and probe it with a batch of two.

        With `compiles` its encoder is compiled for shapes for which that saves time; a smaller last batch is filled up to their size.
        """
        keep_number()  # meanwhile the threads that prepare pictures change what a new thread gets
        self._vae = load_module(setup.components["vae"], setup.dtype, device)
        self._transfer = Transfer(device)
        # on a CPU it takes 0.72 to 0.94 of the time with channels last; on an NVIDIA H200 1.4 times (float32) and 1.7 times (bfloat16)
        is_last = not setup.has_frames and device.type == "cpu" and setup.dtype == "float32"
        self._memory_format = torch.channels_last if is_last else torch.contiguous_format
        self._vae.to(memory_format=self._memory_format)
        self._dtype = DTYPES[setup.dtype]
        self._device = device
        self._compiled: Compiled | None = None
        self.is_single = False
        """Whether pictures are encoded one by one."""
        self._setup = setup
        self._has_probed_videos = False
        self._probe(frames=1)
        if compiles and not self.is_single and isinstance(getattr(self._vae, "encoder", None), torch.nn.Module):
            self._compiled = Compiled(self._vae)
        elif compiles:
            _log.warning("%s cannot be compiled for batches; it runs uncompiled", setup.components["vae"].class_name)

    def _probe(self, frames: int) -> None:
        if not self.is_single and (reason := self._why_single(frames)):
            self.is_single = True
            what = "pictures" if frames == 1 else "videos"
            _log.warning("%s: %s; %s are encoded one by one", self._setup.components["vae"].class_name, reason, what)

    def submit(self, batch: Pictures, took: Took = ignore) -> Result:
        """Begin to encode pictures. The result raises EncodeFailed, which names the first entry that is faulty even in float32."""
        begun = self._begin(batch, took)
        return lambda: make_sound("the VAE", batch, begun(), lambda some: self._begin(some)(), [self._vae])

    def _begin(self, batch: Pictures, took: Took = ignore) -> "Callable[[], Entries]":
        if len(batch) > 1 and batch[0][1].ndim == _OF_VIDEO and not self._has_probed_videos:
            self._has_probed_videos = True
            self._probe(frames=1 + self._setup.temporal_factor)
        # clips of one shape may still have different numbers of reference pictures
        is_mixed = self._setup.is_split and len({_in_front(pixels) for _key, pixels in batch}) > 1
        together = [[pair] for pair in batch] if self.is_single or is_mixed else [batch]

        def note(seconds: float) -> None:
            took(seconds)
            if ran is not None:  # compiling runs on the CPU
                ran(max(here, seconds))

        began = time.perf_counter()
        parts = (self._encoded([key for key, _ in pairs], self._transfer.stacked([pixels for _, pixels in pairs])) for pairs in together)
        begun = self._transfer.begin([key for key, _ in batch], parts, note)
        here, ran = time.perf_counter() - began, self._compiled.ran if self._compiled is not None else None
        return begun

    def _encoded(self, keys: Sequence[Key], pixels: Tensor) -> "Callable[[], list[Made]]":
        with torch.inference_mode():
            there, front = self._transfer.to_device(pixels), _in_front(pixels[0]) if self._setup.is_split else 0
            references, clip = (there[:, :front], there[:, front:]) if front else (None, there)
            parts = [self._latents_of(clip, keys, given) for given in ((GIVEN, COVERED) if self._setup.is_split else (GIVEN,))]
            made = {self._setup.stored: torch.cat(parts, dim=1).contiguous()}
            if self._setup.mask_channels:
                made[MASK_BITS] = fold_mask(clip[: len(keys), ..., _COLOURS] != GIVEN, self._setup.factor, self._setup.temporal_factor)
            if references is not None:
                made[self._setup.stored] = torch.cat([self._references(references, keys), made[self._setup.stored]], dim=2)
                made[MASK_BITS] = torch.nn.functional.pad(made[MASK_BITS], (0, 0, 0, 0, front, 0))
            begun = fetch(self._transfer, made, [self._setup.stored], len(keys))

        def finish() -> list[Made]:
            copied, finite = begun()
            return [Made({name: copied[name][row] for name in made}, is_finite=one) for row, one in enumerate(finite)]

        return finish

    def _latents_of(self, pixels: Tensor, keys: Sequence[Key], given: int) -> Tensor:
        inputs = to_range(pixels, given, memory_format=self._memory_format).to(self._vae.dtype)
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1) if self._setup.has_alpha else inputs
        inputs = inputs.unsqueeze(2) if self._setup.has_frames and pixels.ndim == _OF_VIDEO else inputs
        with frame_by_frame(self._vae):
            encoded = self._vae.encode(inputs) if self._compiled is None else self._compiled.encode(inputs)
        return self._stored_form(encoded, keys).to(self._dtype)

    def _references(self, frames: Tensor, keys: Sequence[Key]) -> Tensor:
        """Encode reference pictures [B, F, H, W, 4], each alone. What is behind them in place of pixels to make becomes zero when read."""
        seen = torch.cat([self._latents_of(frame, keys, IN_FRONT) for frame in frames.split(1, dim=1)], dim=2)
        mean = torch.tensor(self._vae.config.latents_mean, dtype=seen.dtype, device=seen.device)
        return torch.cat([seen, mean.view(1, -1, 1, 1, 1).expand_as(seen)], dim=1)

    def _why_single(self, frames: int) -> str | None:
        """Return why pictures, or clips of `frames` frames, cannot share a batch: what a VAE raises, or how its latents differ."""
        side = max(PROBE_SIDE, 4 * self._setup.multiple)
        noise = np.random.default_rng(0).integers(0, 256, (2, frames, side, side, 3), dtype=np.uint8)
        if self._setup.mask_channels:
            noise = np.concatenate([noise, np.where(noise[..., :1] < THRESHOLD, COVERED, GIVEN).astype(np.uint8)], axis=-1)
        pixels = torch.from_numpy(noise[:, 0] if frames == 1 else noise)
        kind = "picture" if frames == 1 else "clip"
        keys = [Key(bytes([index] * 16)) for index in range(2)]
        alone: list[Made] = []
        try:
            alone += [self._encoded([key], pixels[index : index + 1])()[0] for index, key in enumerate(keys)]
            together = self._encoded(keys, pixels)()
        except Exception as error:  # noqa: BLE001 - a VAE may raise anything here; the user's pictures may still work one by one
            return f"{'a batch of 2' if alone else 'a'} {kind}{'s' if alone else ''} ends in {type(error).__name__} ({error})"
        one, other = ({str(index): row[self._setup.stored] for index, row in enumerate(rows)} for rows in (alone, together))
        found = difference(one, other, tolerance(self._setup.dtype, self._device))
        return f"a {kind} gives other latents in a batch than alone: {found}" if found else None

    def _stored_form(self, encoded: Foreign, keys: Sequence[Key]) -> Tensor:
        """Return what is stored: moments, mean or sample of the posterior; the latent of a VAE without a posterior."""
        count = len(keys)  # without the pictures that filled up the batch
        if not hasattr(encoded, "latent_dist"):
            return encoded.latent[:count]
        posterior = encoded.latent_dist
        if self._setup.stored == "moments":
            return posterior.parameters[:count]
        mean = posterior.mode()[:count]
        if self._setup.stored == "mean":
            return mean
        noise = self._transfer.to_device(torch.stack([noise_of(key, mean.shape[1:]) for key in keys]))  # drawn while a GPU encodes
        return mean + posterior.std[:count] * noise.to(mean.dtype)


class Compiled:
    """A VAE whose encoder goes through `torch.compile` for shapes for which that saves time. Use it from one thread."""

    def __init__(self, vae: Foreign) -> None:
        self._vae = vae
        self._encoder = vae.encoder
        self._fast: Foreign = torch.compile(vae.encoder, dynamic=False)
        self._policy = Compiling()
        self._sizes: dict[Hashable, int] = {}
        """How many pictures a compiled batch has, by the rest of its shape and its dtype."""
        self._last: Hashable = None

    def encode(self, inputs: Tensor) -> Foreign:
        """Encode as the VAE's own `encode`. A batch that is smaller than the compiled one is filled up with its last picture."""
        rest = (tuple(inputs.shape[1:]), inputs.dtype)
        size = max(len(inputs), self._sizes.get(rest, 0))
        self._last = (size, *rest)
        if not self._policy.is_due(self._last):
            self._last = (len(inputs), *rest)
            return self._vae.encode(inputs)
        self._sizes[rest] = size
        filled = torch.cat([inputs, inputs[-1:].expand(size - len(inputs), *inputs.shape[1:])]) if len(inputs) < size else inputs
        self._vae.encoder = self._fast
        try:
            return self._vae.encode(filled)
        except torch.OutOfMemoryError:
            self._sizes.pop(rest)
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the encoder also runs uncompiled
            self._policy.is_given_up = True
            _log.warning("the VAE's encoder cannot be compiled here (%s: %s); it runs uncompiled", type(error).__name__, str(error)[:200])
        finally:
            self._vae.encoder = self._encoder
        return self._vae.encode(inputs)

    @property
    def ran(self) -> Callable[[float], None]:
        """Call this with the seconds that the last encoded batch took."""
        return partial(self._policy.took, self._last)


def _in_front(pixels: Any) -> int:
    """Return how many frames of pixels [F, H, W, 4] are reference pictures; 0 of a single picture."""
    return int((pixels[:, 0, 0, -1] == IN_FRONT).sum()) if pixels.ndim == _OF_VIDEO else 0


def to_range(pixels: Tensor, given: int = GIVEN, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Convert uint8 [B, ..., H, W, 3] to float32 [B, 3, ..., H, W] in -1..1, by the same operations as diffusers' training scripts.

    Where a fourth channel is not `given`, it becomes 0. With `channels_last`, as pixels are, nothing is turned in memory.
    """
    made = pixels[..., :_COLOURS].movedim(-1, 1).contiguous(memory_format=memory_format).float().div_(255).sub_(0.5).div_(0.5)
    return made if pixels.shape[-1] == _COLOURS else made.mul_(pixels[..., _COLOURS:].movedim(-1, 1) == given)


def fold_mask(mask: Tensor, factor: int, temporal_factor: int) -> Tensor:
    """Fold a mask [B, (F,) H, W] to the size of latents: each pixel of a latent pixel gets a channel, and eight channels make a byte.

    Of the frames that make one latent frame, the one in the middle is used, as in Wan VACE's pipeline (`nearest-exact`).
    """
    if mask.ndim == _OF_VIDEO:
        frames = mask.shape[1]
        count = (frames - 1) // temporal_factor + 1
        mask = mask[:, ((torch.arange(count) + 0.5) * (frames / count)).long().to(mask.device)]
    split = mask.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    channels = split.movedim((-3, -1), (1, 2)).flatten(1, 2).to(torch.uint8)
    missing = -channels.shape[1] % 8
    padded = torch.cat([channels, channels.new_zeros(len(channels), missing, *channels.shape[2:])], dim=1)
    return torch.stack([padded[:, bit::8] << (7 - bit) for bit in range(8)]).sum(dim=0).to(torch.uint8).contiguous()


def noise_of(key: Key, shape: Sequence[int]) -> Tensor:
    """Return normal noise that depends on the key alone. It is drawn on the CPU, so it is the same on every device and in every batch."""
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)
