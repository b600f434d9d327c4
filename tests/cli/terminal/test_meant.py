"""A job of 30 pictures typed wrong: each line ends in what was meant, or in a line to copy that the command understands."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from cachestore.cli import USAGE, main, make_parser
from cachestore.cli import precompute as command
from cachestore.cli.precompute import request_from
from tests import fakes

pytestmark = pytest.mark.processes

PARSER = make_parser(["precompute"])
PLAIN = "photos --model model --store store"


def meant(data="photos", **options):
    """The request that is meant, in short."""
    return {"data": data, "model": "model", "store": "store", **options}


RIGHT = {
    "--model model photos --store store": meant(),
    f"{PLAIN} --resolution 512,512": meant(resolution=(512, 512)),
    f"{PLAIN} --batch_size 4": meant(batch_size=4),
    "--model=model --store=store photos/": meant("photos/"),
}
"""Lines that are understood as they are."""

WRONG = {
    # arguments left out, or in another order
    "photos model store": meant(),
    "photos model --store store": meant(),
    "photos --model model": meant(store="cache"),
    "-d photos -m model -o store": meant(),
    "photos/ model -o store": meant("photos/"),
    "photos --model model --store photos": meant(store="photos/cache"),
    "photos --model model --store file.txt": meant(store="cache"),
    "fotos --model model --store store": meant(),
    "photo/ --model model --store store": meant(),
    "photos --model mdoel/ --store store": meant(),
    "photos/0.png --model model --store store": meant(),
    # trainers' spellings
    "--train_data_dir photos --pretrained_model_name_or_path model --output_dir store": meant(),
    "--train_data_dir=photos --pretrained_model_name_or_path=model --output_dir=store": meant(),
    "--instance_data_dir photos --pretrained_model_name_or_path model --output_dir store --instance_prompt sks": meant(caption="sks"),
    "--image_directory photos --model model --cache_directory store": meant(),
    "--data photos --ckpt model --save-path store": meant(),
    "photos --model_path model --cache_dir store": meant(),
    f"{PLAIN} --pretrained_vae_model_name_or_path vae": meant(vae="vae"),
    f"{PLAIN} --vae_batch_size 4": meant(batch_size=4),
    f"{PLAIN} --caption_extension .txt": meant(),
    f"{PLAIN} --resolution 512x512": meant(resolution=512),
    f"{PLAIN} --resolution 512 768": meant(resolution=(512, 768)),
    f"{PLAIN} --resolution=1024px": meant(resolution=1024),
    f"{PLAIN} --bucket_no_upscale": meant(no_upscale=True),
    f"{PLAIN} --enable_bucket --bucket_reso_steps 32": meant(bucket_step=32),
    f"{PLAIN} --flip_aug": meant(flip=True),
    f"{PLAIN} --center_crop --random_flip": meant(flip=True),
    f"{PLAIN} --random_crop --seed 42": meant(crop="random"),
    f"{PLAIN} --mixed_precision fp16 --train_batch_size 1 --learning_rate 1e-4": meant(),
    f"{PLAIN} --cache_latents --cache_latents_to_disk --cache_text_encoder_outputs": meant(),
    f"{PLAIN} --max_data_loader_n_workers 2 --num_processes 3": meant(workers=2, procs=3),
    f"{PLAIN} --clip_skip 2": meant(encode_arg={"clip_skip": 1}),
    f"{PLAIN} --num_repeats 10": meant("", sources=10),
    f"{PLAIN} --trigger_word sks": meant(prefix="sks, "),
    f"{PLAIN} --shuffle_caption --keep_tokens 2": meant(keep_tokens=2),
    f"{PLAIN} --gpu_ids 1": meant(device="cuda:1"),
    f"{PLAIN} --num_frames 17": meant(frames=(17,)),
    # slips
    f"{PLAIN} --encode latent": meant(encode=("latents",)),
    f"{PLAIN} --encode images captions": meant(encode=("latents", "text")),
    f"{PLAIN} --device gpu": meant(device="cuda"),
    f"{PLAIN} \u2013-flip": meant(flip=True),
    f"{PLAIN} -flip": meant(flip=True),
    f"{PLAIN} --FLIP": meant(flip=True),
    f"{PLAIN} flip": meant(flip=True),
    "photos --modle model --sotre store": meant(),
    f"{PLAIN} --dryrun": meant(),
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Run a line in a folder with 30 pictures, a model and a file; nothing is encoded. Returns what is asked for, or the error."""
    monkeypatch.chdir(tmp_path)
    fakes.captioned(tmp_path / "photos", 30)
    Path("model").mkdir()
    Path("file.txt").touch()
    asked = []

    def run(request, *_rest, **_how):
        asked.append(request)
        raise SystemExit(0)

    monkeypatch.setattr(command, "_encode", run)

    def call(line, verb="precompute"):
        code = None
        with suppress(SystemExit):
            code = main([*([verb] if verb else []), *shlex.split(line)])
        return code, (asked[-1] if asked else None), capsys.readouterr().err

    return call


def in_short(request, wanted):
    """What a request has of what is wanted."""
    found = {name: getattr(request, name) for name in wanted if name not in {"prefix", "keep_tokens", "sources"}}
    found |= {name: getattr(request.policy, name) for name in wanted if name in {"prefix", "keep_tokens"}}
    return found | ({"sources": request.sources[0].repeats} if "sources" in wanted else {})


@pytest.mark.parametrize("line", RIGHT)
def test_a_line_that_is_right_is_run(said, line):
    _code, request, _err = said(line)
    assert request is not None
    assert in_short(request, RIGHT[line]) == RIGHT[line]


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_is_wrong_is_answered_with_the_one_that_was_meant(said, line):
    _code, request, err = said(line)
    assert request is None
    copied = shlex.split(re.search(r"[Tt]o copy: (cachestore precompute .*)$", err.strip())[1])[1:]
    wanted = WRONG[line]
    asked = request_from(PARSER.parse_args(copied))
    assert in_short(asked, wanted) == wanted


def test_there_are_forty_of_them():
    assert len(WRONG) >= 40


@pytest.mark.parametrize("verb", ["train", "encode", "cache", ""])
def test_another_verb_or_none_is_answered_too(said, verb):
    code, _request, err = said(PLAIN, verb)
    assert "To copy: cachestore precompute photos --model model --store store" in err
    assert code is None


def test_what_is_missing_comes_from_the_store_that_is_there(said, tmp_path, makers):
    import cachestore as cs

    cs.precompute("photos", model="model", store="store", inline=True)
    for line in ("--store store", "photos --store store", "--again store"):
        code, _request, err = said(line)
        assert (code, "cachestore precompute" in err.rpartition("To copy: ")[2], "--again" in err) == (USAGE, True, True)
    assert (
        "DATA comes first. To copy: cachestore precompute photos --model model --store store"
        in said("store --model model --store photos")[2]
    )


def test_what_nobody_can_understand_gets_no_line(said):
    for line in (f"{PLAIN} --frobnicate 3", "photos --model", f"{PLAIN} --batch-size four"):
        assert "To copy" not in said(line)[2]
