"""Runs the caching and loading of each family of sd-scripts with tiny encoders, with its own cache and with a store, to the bit.

Usage: python scripts/conformance/live_sd_scripts_families.py CHECKOUT [--work FOLDER] [--packages FOLDER ...]

The trainer's strategies, data set and collation are real. VAEs are stand-ins; text encoders are tiny models of the families' own classes,
or stand-ins where these are large by construction. Prints a table, and exits 1 at the first difference.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
FAMILIES = ("sd", "sdxl", "sd3", "flux", "lumina", "hunyuan_image", "anima")
LENGTH = 40


def child(family: str, data: Path, out: Path, tokenizers: Path) -> None:  # noqa: PLR0912, PLR0915 - a table of families
    """Cache and read every batch, and write down what came."""
    import torch
    from library import config_util, strategy_base, train_util
    from transformers import (
        AutoTokenizer,
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
    )

    torch.manual_seed(0)
    encoded: dict[str, int] = {}

    class Vae(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def __init__(self) -> None:
            super().__init__()
            step, channels = {"sd": (8, 4), "sdxl": (8, 4), "hunyuan_image": (32, 64)}.get(family, (8, 16))
            self.conv = torch.nn.Conv2d(3, channels, step, stride=step)

        def encode(self, pixels: Any) -> Any:
            encoded["latents"] = encoded.get("latents", 0) + len(pixels)
            latents = self.conv(pixels.float())
            drawn = SimpleNamespace(sample=lambda: latents)
            return {"sd": SimpleNamespace(latent_dist=drawn), "sdxl": SimpleNamespace(latent_dist=drawn), "hunyuan_image": drawn}.get(
                family, latents
            )

        def encode_pixels_to_latents(self, pixels: Any) -> Any:
            return self.encode(pixels)[:, :, None]

    def counting(model: Any) -> Any:
        model.eval()
        model.register_forward_pre_hook(lambda _model, _inputs: encoded.__setitem__("text", encoded.get("text", 0) + 1))
        return model

    clip, t5 = (
        CLIPTokenizer.from_pretrained(tokenizers / "openai_clip-vit-large-patch14"),
        AutoTokenizer.from_pretrained(tokenizers / "google_t5-v1_1-xxl"),
    )
    shape = {"vocab_size": 514, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2}
    of_clip = CLIPTextConfig(**shape, max_position_embeddings=77, eos_token_id=2, projection_dim=32)
    of_t5 = T5Config(d_ff=64, d_kv=16, d_model=32, num_heads=2, num_layers=2, vocab_size=300, feed_forward_proj="gated-gelu")
    clip_l, clip_g, big = CLIPTextModel(of_clip), CLIPTextModelWithProjection(of_clip), T5EncoderModel(of_t5)
    module = __import__(f"library.strategy_{family}", fromlist=["it"])
    word = {"hunyuan_image": "HunyuanImage"}.get(family, family.capitalize())
    tokenize = object.__new__(getattr(module, f"{word}TokenizeStrategy"))
    fields: dict[str, Any] = {}
    match family:
        case "sd":
            fields, encoders = {"tokenizer": clip, "max_length": 77}, [clip_l]
        case "sdxl":
            fields, encoders = {"tokenizer1": clip, "tokenizer2": clip, "max_length": 77}, [clip_l, clip_g]
        case "sd3":
            fields, encoders = (
                {"clip_l": clip, "clip_g": clip, "t5xxl": t5, "t5xxl_max_length": LENGTH},
                [CLIPTextModelWithProjection(of_clip), clip_g, big],
            )
        case "flux":
            fields, encoders = {"clip_l": clip, "t5xxl": t5, "t5xxl_max_length": LENGTH}, [clip_l, big]
        case "lumina":
            from transformers import Gemma2Config, Gemma2Model

            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
            fields = {"tokenizer": t5, "system_prompt": "As reported: ", "max_length": LENGTH}
            encoders = [Gemma2Model(Gemma2Config(vocab_size=300, head_dim=16, **small))]
        case "hunyuan_image":

            class Vlm(torch.nn.Module):
                device, dtype = torch.device("cpu"), torch.float32

                def __init__(self) -> None:
                    super().__init__()
                    self.rows = torch.nn.Embedding(300, 32)

                def forward(self, input_ids: Any, attention_mask: Any, output_hidden_states: bool) -> Any:
                    rows = self.rows(input_ids)
                    return SimpleNamespace(hidden_states=[rows, rows * 2, rows * 3])

            class Byt5(torch.nn.Module):
                device, dtype = torch.device("cpu"), torch.float32

                def __init__(self) -> None:
                    super().__init__()
                    self.rows = torch.nn.Embedding(300, 1472)

                def forward(self, ids: Any, attention_mask: Any) -> Any:
                    return [self.rows(ids)]

            fields, encoders = {"vlm_tokenizer": t5, "byt5_tokenizer": t5}, [Vlm(), Byt5()]
        case _:
            from transformers import Qwen3Config, Qwen3Model

            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
            fields = {"qwen3_tokenizer": t5, "t5_tokenizer": t5, "qwen3_max_length": LENGTH, "t5_max_length": LENGTH}
            encoders = [Qwen3Model(Qwen3Config(vocab_size=300, head_dim=16, **small))]
    vars(tokenize).update(fields)
    encoders = [counting(model) for model in encoders]
    encoding = getattr(module, f"{word}TextEncodingStrategy")()
    if family in ("sd", "sdxl"):
        from library import strategy_sd

        latents = strategy_sd.SdSdxlLatentsCachingStrategy(family == "sd", True, 1, False)
    else:
        latents = getattr(module, f"{word}LatentsCachingStrategy")(True, 1, False)
    text = None if family == "sd" else getattr(module, f"{word}TextEncoderOutputsCachingStrategy")(True, 1, False)
    for kind, strategy in (
        (strategy_base.LatentsCachingStrategy, latents),
        (strategy_base.TextEncoderOutputsCachingStrategy, text),
        (strategy_base.TokenizeStrategy, tokenize),
        (strategy_base.TextEncodingStrategy, encoding),
    ):
        kind._strategy = strategy
    off: dict[str, Any] = dict.fromkeys(("keep_tokens_separator", "secondary_separator", "caption_prefix", "caption_suffix"))
    off |= dict.fromkeys(("shuffle_caption", "enable_wildcard", "color_aug", "random_crop", "is_reg", "cache_info"), False)
    off |= dict.fromkeys(
        ("keep_tokens", "token_warmup_min", "token_warmup_step", "caption_dropout_every_n_epochs", "caption_tag_dropout_rate"), 0
    )
    subset = train_util.DreamBoothSubset(
        image_dir=str(data),
        class_tokens=None,
        caption_extension=".txt",
        alpha_mask=True,
        num_repeats=1,
        caption_separator=",",
        flip_aug=True,
        face_crop_aug_range=None,
        caption_dropout_rate=0.25 if family == "anima" else 0,
        **off,
    )
    one = train_util.DreamBoothDataset(
        [subset],
        is_training_dataset=True,
        batch_size=1,
        resolution=(128, 128),
        enable_bucket=True,
        min_bucket_reso=64,
        max_bucket_reso=192,
        bucket_reso_steps=64,
        bucket_no_upscale=False,
        validation_seed=None,
        resize_interpolation=None,
        network_multiplier=1.0,
        prior_loss_weight=1.0,
        debug_dataset=True,
        validation_split=0.0,
    )
    del config_util
    one.make_buckets()
    group = train_util.DatasetGroup([one])
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu", wait_for_everyone=lambda: None)
    group.set_current_strategies()
    group.new_cache_latents(Vae(), accelerator)
    if text is not None:
        group.new_cache_text_encoder_outputs(encoders, accelerator)
    batches: dict[str, Any] = {}

    def written(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest()]
        return [written(each) for each in value] if isinstance(value, list | tuple) else repr(value)

    for is_flipped in (False, True):
        train_util.random.random = lambda is_flipped=is_flipped: 0.0 if is_flipped else 1.0
        for number in range(len(one)):
            batch = one[number]
            batches[f"{Path(batch['image_keys'][0]).name} {is_flipped}"] = {
                name: written(value) for name, value in batch.items() if name != "image_keys"
            }
    out.write_text(json.dumps({"encoded": encoded, "batches": batches}))


def main() -> int:
    """Compare the families."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--work", type=Path, default=Path("live-sd-scripts-families"))
    parser.add_argument("--packages", nargs="*", default=[], type=os.path.abspath)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        sys.path.insert(0, str(chosen.checkout))
        family, *paths = chosen.child
        child(family, *map(Path, paths))
        return 0
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from conformance import live_sd_scripts_models as models
    from conformance.live_sd_scripts import forked, warm_up

    warm_up(chosen.packages)
    work = chosen.work.resolve()
    models.make_tokenizers(work / "tokenizers")
    for family in FAMILIES:
        found = []
        for who in ("own", "own", "live", "live"):
            data = work / family / who
            if not data.exists():
                models.make_pictures(data, 5)
                (data / "picture_001.txt").write_text('a sign that says "open"\n')
            out, log = work / f"{family}-{who}.json", work / f"{family}-{who}.log"
            front = ["-m", "cachestore.live", "sd-scripts", "--store", str(work / "store"), "--name", f"sd-scripts/{family}"]
            what = [__file__, str(chosen.checkout), "--child", family, str(data), str(out), str(work / "tokenizers")]
            pid = forked([*(front if who == "live" else []), *what], os.environ, work, log)
            if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                print(f"{family:14} DIFFERS {who} ended with {code}: {log.read_text()[-3000:]}")
                return 1
            found.append(json.loads(out.read_text()))
        own, again, first, second = found
        files = list((work / family / "live").rglob("*.npz"))
        if first != own or second != again or second["encoded"] or files:
            print(f"{family:14} DIFFERS {own['encoded']} {first['encoded']} {second['encoded']} {files}")
            names = [name for name in own["batches"] if own["batches"][name] != first["batches"][name]]
            print(names[:2], [[own["batches"][name], first["batches"][name]] for name in names[:1]])
            return 1
        reported = f"{len(own['batches'])} batches equal, plain and mirrored; encoded {own['encoded']}, then nothing; 0 cache files"
        print(f"{family:14} ok      {reported}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
