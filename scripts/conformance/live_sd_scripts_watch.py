"""Runs a script of sd-scripts as it is, and writes down its losses, how much each encoder encoded, and what training read.

Its draws follow from what is drawn for: so two runs draw alike.

Usage: python live_sd_scripts_watch.py SCRIPT ARGS...
WATCH: a folder; WATCH_START: how DataLoader's workers are started; WATCH_KILL: the class of an encoder, whose first call makes rank 1 kill
itself, but not after torchrun has started it again. The other ranks take a second for each call, so that it gets one.
"""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import hashlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the script."""
    import multiprocessing

    import torch

    script = Path(sys.argv[1])
    sys.path.insert(0, str(script.resolve().parent))
    if start := os.environ.get("WATCH_START"):
        multiprocessing.set_start_method(start)
    from diffusers import AutoencoderKL
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from library import flux_models, train_util
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

    seen: dict = {"losses": [], "encoded": {}, "latents": [], "text": [], "from": []}
    rank = os.environ.get("RANK", "0")
    kill = os.environ.get("WATCH_KILL") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None

    def noise(mean: "torch.Tensor") -> "torch.Tensor":
        rows = []
        for one in mean:
            seed = int.from_bytes(hashlib.sha256(one.float().cpu().numpy().tobytes()).digest()[:7], "little")
            rows.append(torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows).to(mean)

    def count(kind: type, name: str) -> None:
        own = getattr(kind, name)

        def counted(self, first, *more, **named):
            if not torch.is_grad_enabled():
                seen["encoded"][kind.__name__] = seen["encoded"].get(kind.__name__, 0) + len(first)
                if kind.__name__ == kill:
                    os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else time.sleep(1)
            return own(self, first, *more, **named)

        setattr(kind, name, counted)

    DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mean + self.std * noise(self.mean)

    def forward(self, z):
        mean, logvar = torch.chunk(z, 2, dim=self.chunk_dim)
        return mean + torch.exp(0.5 * logvar) * noise(mean)

    flux_models.DiagonalGaussian.forward = forward
    for kind, name in (
        (flux_models.AutoEncoder, "encode"),
        (AutoencoderKL, "encode"),
        (CLIPTextModel, "forward"),
        (CLIPTextModelWithProjection, "forward"),
        (T5EncoderModel, "forward"),
    ):
        count(kind, name)
    add = train_util.LossRecorder.add

    def added(self, *, epoch, step, loss):
        seen["losses"].append(float(loss).hex())
        return add(self, epoch=epoch, step=step, loss=loss)

    train_util.LossRecorder.add = added
    loader: Any = torch.utils.data.DataLoader
    own = loader.__iter__

    def following(self):
        def batches(them):
            for batch in them:
                if isinstance(batch, dict) and "latents" in batch:
                    seen["latents"].append(None if batch["latents"] is None else digest(batch["latents"]))
                    seen["text"].append([digest(one) for one in batch["text_encoder_outputs_list"] or []])
                yield batch

        return batches(own(self))

    def digest(tensor):
        return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

    loader.__iter__ = following
    if os.environ.get("WORLD_SIZE", "1") != "1":  # on CPUs accelerate wraps what has no gradient too, which torch refuses

        class Wrapped(torch.nn.parallel.DistributedDataParallel):
            def __new__(cls, module, **how):
                return super().__new__(cls) if any(one.requires_grad for one in module.parameters()) else module

        torch.nn.parallel.DistributedDataParallel = Wrapped
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        Path(os.environ["WATCH"], f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
