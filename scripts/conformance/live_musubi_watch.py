"""Runs a script of musubi-tuner as it is, and writes down its losses, how much each encoder encoded, and what training read.

Usage: python live_musubi_watch.py SCRIPT ARGS...
   or, to make models: python live_musubi_watch.py --models FOLDER SEED

WATCH: a folder; WATCH_KILL: latents or text, whose third value makes this process kill itself. Folders are listed in the order of names,
as the trainer's own files come in that of the file system.
"""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import hashlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: 0  # a default of one of its functions asks for it
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")  # whatever torch it was built for


def make(folder: Path, seed: int) -> None:
    """Make tiny random checkpoints of Wan 2.1: DiT, VAE and T5."""
    from musubi_tuner.wan.configs import WAN_CONFIGS
    from musubi_tuner.wan.modules import model, t5, vae
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    config = WAN_CONFIGS["t2v-1.3B"]
    shape = {name: config[name] for name in ("dim", "ffn_dim", "freq_dim", "in_dim", "out_dim", "num_heads", "num_layers", "text_len")}
    dit = model.WanModel(**shape, attn_mode="torch")
    torch.nn.init.normal_(dit.head.head.weight, std=0.02)  # it begins with zeros
    save_file(dit.state_dict(), folder / "dit.safetensors")
    made = vae.WanVAE_(dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
    save_file(made.state_dict(), folder / "vae.safetensors")
    save_file(t5.umt5_xxl(encoder_only=True, return_tokenizer=False).state_dict(), folder / "t5.safetensors")


def main() -> None:
    """Run the script."""
    script, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    sys.path.insert(0, str(script.resolve().parent))
    import glob

    from musubi_tuner.utils import train_utils
    from musubi_tuner.wan.modules import t5, vae

    seen: dict[str, Any] = {"losses": [], "encoded": {"latents": 0, "text": 0}, "batches": []}
    listed, own_encode, own_text, own_add = glob.glob, vae.WanVAE.encode, t5.T5EncoderModel.__call__, train_utils.LossRecorder.add
    glob.glob = lambda *args, **options: sorted(listed(*args, **options))

    def count(part: str, number: int) -> None:
        seen["encoded"][part] += number
        if os.environ.get("WATCH_KILL") == part and seen["encoded"][part] > 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def encode(self: Any, videos: Any) -> Any:
        count("latents", len(videos))
        return own_encode(self, videos)

    def text(self: Any, texts: Any, device: Any) -> Any:
        count("text", len(texts))
        return own_text(self, texts, device)

    def add(self: Any, *, epoch: int, step: int, loss: float) -> Any:
        seen["losses"].append(float(loss).hex())
        return own_add(self, epoch=epoch, step=step, loss=loss)

    vae.WanVAE.encode, t5.T5EncoderModel.__call__, train_utils.LossRecorder.add = encode, text, add
    loader: Any = torch.utils.data.DataLoader
    own_iter = loader.__iter__

    def following(self: Any) -> Any:
        for batch in own_iter(self):
            seen["batches"].append({name: [_digest(one) for one in value] for name, value in batch.items() if value is not None})
            yield batch

    loader.__iter__ = following
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        Path(os.environ["WATCH"], f"seen-{rank}.json").write_text(json.dumps(seen))


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    if sys.argv[1] == "--models":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
