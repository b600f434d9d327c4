"""What is meant by a command line that `precompute` refuses: other tools' names of options, slips, and paths that do not exist.

The answer is a line to copy, never a guess that runs: an option may mean something else in the tool that it is from.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.errors import BadInput
from cachestore.core.words import first_of, misspelt, nearest
from cachestore.files.paths import MARKER

if TYPE_CHECKING:
    from cachestore.jobs.plan.options import PrecomputeRequest

DATA: Final = "DATA"
_SHORT: Final = {"d": DATA, "i": DATA, "m": "model", "o": "store", "s": "store", "n": "name", "r": "resolution", "b": "batch-size"}
OTHER_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("data", "data-dir", "data-path", "dataset", "dataset-dir", "dataset-name", "dataset-path", "folder", "folder-path"), DATA
    ),
    **dict.fromkeys(("image-dir", "image-folder", "images", "input", "input-dir", "instance-data-dir", "class-data-dir"), DATA),
    **dict.fromkeys(("train-data-dir", "video-dir", "video-directory", "image-directory"), DATA),
    **dict.fromkeys(("base-model", "checkpoint", "ckpt", "dit", "model-id", "model-name", "model-name-or-path", "model-path"), "model"),
    **dict.fromkeys(("pretrained-model", "pretrained-model-name-or-path"), "model"),
    **dict.fromkeys(("cache", "cache-dir", "cache-directory", "cache-path", "out", "output", "output-dir", "output-path"), "store"),
    **dict.fromkeys(("save-dir", "save-path"), "store"),
    **dict.fromkeys(("pretrained-vae-model-name-or-path", "vae-model", "vae-path"), "vae"),
    **dict.fromkeys(("text-encoder-path", "text-encoder-model"), "text-encoder"),
    **dict.fromkeys(("vae-batch-size", "text-encoder-batch-size"), "batch-size"),
    **dict.fromkeys(("dataloader-num-workers", "max-data-loader-n-workers", "max-workers", "num-workers"), "workers"),
    **dict.fromkeys(("num-gpus", "num-processes", "nproc-per-node"), "procs"),
    **dict.fromkeys(("num-frames", "target-frames"), "frames"),
    **dict.fromkeys(("frame-rate", "target-fps"), "fps"),
    **dict.fromkeys(("image-size", "size"), "resolution"),
    **dict.fromkeys(("flip-aug", "flip-x", "horizontal-flip", "random-flip"), "flip"),
    **dict.fromkeys(("dry-run", "plan"), "plan-only"),
    **dict.fromkeys(("force", "overwrite"), "replace"),
    **dict.fromkeys(("default-caption", "instance-prompt"), "caption"),
    **dict.fromkeys(("sample-prompts", "validation-prompts"), "prompts"),
    "bucket-no-upscale": "no-upscale",
    "bucket-reso-steps": "bucket-step",
    "max-bucket-reso": "bucket-max",
    "min-bucket-reso": "bucket-min",
    **dict.fromkeys(("last", "redo", "remember", "repeat", "resume", "same"), "again"),
    "text-encoder-2": "text-encoder",
}
"""The option of `precompute` for an option of another tool; DATA is the first argument."""

_IS_SO: Final = {
    **dict.fromkeys(("cache-latents", "cache-latents-to-disk"), "latents are always encoded, unless --encode says otherwise"),
    **dict.fromkeys(
        ("cache-text-encoder-outputs", "cache-text-encoder-outputs-to-disk", "cache-text-embeddings"),
        "text is always encoded, unless --encode says otherwise",
    ),
    "class-prompt": "class pictures are another DATA, with captions of their own",
    "image-column": "a manifest's columns image, file_name, path and video are found without it",
    "seed": "nothing is drawn but random crops, which have --crop-seed",
    "enable-bucket": "pictures always go into buckets of their aspect",
    "caption-extension": ".txt and .caption files are found without it",
    "dataset-config": "DATA and options take its place; a file for --config has other fields",
    "max-token-length": "the model decides it (--encode-arg changes it)",
    **dict.fromkeys(
        ("bf16", "fp16", "mixed-precision", "full-bf16", "full-fp16"),
        "dtypes are chosen by model, or by --vae-dtype and --text-dtype",
    ),
}
"""Options of other tools that need none here, and why."""
_OF_TRAINING: Final = re.compile(
    r"(learning-rate|lr-.*|max-train-.*|num-train-epochs|epochs|train-batch-size|network-.*|optimizer.*|save-.*|logging-dir|log-with|report-to"
    r"|gradient-.*|xformers|sdpa|mem-eff-attn|lowram|prior-loss-weight|with-prior-preservation|checkpoint.*-.*|resume-.*|noise-.*|min-snr-.*"
    r"|output-name|caption-dropout-.*|persistent-.*|max-grad-norm|guidance-scale|loss-.*|timestep-.*|use-8bit-adam|weighting-.*)"
)
_NO_VALUE: Final = re.compile(
    r"(cache-.*|enable-.*|bf16|fp16|full-.*|xformers|sdpa|lowram|mem-eff-attn|gradient-checkpointing|persistent-.*|use-.*|with-.*)"
)
_DASHES: Final = "-\u2013\u2014\u2212"
"""Hyphens, and what word processors make of them."""
_IS_OPTION: Final = re.compile(f"[{_DASHES}]+[A-Za-z]")
_LISTS: Final = ("resolution", "frames", "encode", "roles")
_WIDTH_HEIGHT: Final = re.compile(r"(\d+)[xX*](\d+)")
_PIXELS: Final = re.compile(r"(\d+) ?(px|p)")
_ENCODE: Final = {
    **dict.fromkeys(("latent", "image", "images", "picture", "pictures", "vae", "video", "videos"), "latents"),
    **dict.fromkeys(("texts", "caption", "captions", "prompt", "prompts", "embeds", "embeddings", "te"), "text"),
}


@dataclass(slots=True)
class Meant:
    """A command line as it may have been meant."""

    data: list[str] = field(default_factory=list[str])
    options: list[tuple[str, list[str]]] = field(default_factory=list[tuple[str, list[str]]])
    notes: list[str] = field(default_factory=list[str])
    """What was left out, and why."""
    unknown: list[str] = field(default_factory=list[str])
    changed: bool = False
    repeats: int | None = None

    def add(self, name: str, *values: str) -> None:
        """Add an option with its values; a second one takes the place of the first, unless it may be repeated."""
        self.options = [one for one in self.options if one[0] != name or name == "encode-arg"]
        self.options.append((name, list(values)))

    def has(self, name: str) -> bool:
        """Whether an option is there."""
        return any(one == name for one, _values in self.options)

    def line(self) -> str | None:
        """Return the command to copy; None if something in it is not understood, or needed and not there."""
        from cachestore.jobs.plan.typed import in_line

        store = next((values[0] for name, values in self.options if name == "store"), None)
        is_whole = self.has("again") or self.has("config") or (self.has("model") and bool(self.data or self.has("sources")))
        if self.unknown or (not is_whole and (store is None or not (Path(store) / MARKER).exists())):
            return None
        if not is_whole:  # what is missing is in the store
            self.add("again")
        if store is None and not self.has("config"):
            self.add("store", "cache")
        data = self.data
        if self.repeats is not None:
            self.add("sources", json.dumps([{"data": one, "repeats": self.repeats} for one in data], ensure_ascii=False))
            data = []
        words = [word for name, values in self.options for word in (f"--{name}", *values)]
        return in_line(["cachestore", "precompute", *data, *words])


def understand(arguments: Sequence[str]) -> Meant:
    """Return what the arguments of `precompute` may have meant."""
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, switched_off

    takes = {in_command(one.name)[2:]: not isinstance(one.default, bool) for one in fields(PrecomputeRequest) if one.name != "data"}
    """The options of `precompute`, each with whether it takes a value."""
    takes |= {switched_off(f"--{name}")[2:]: False for name, takes_value in takes.items() if not takes_value}
    takes |= {"config": True, "progress": True, **dict.fromkeys(("plan-only", "again", "json", "quiet"), False)}
    meant = Meant()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip(_DASHES).partition("=")
        if word == "-" or not _IS_OPTION.match(word):
            if takes.get(word) is False and not Path(word).exists():  # a switch whose hyphens were forgotten
                meant.add(word)
                meant.changed = True
            else:
                meant.data.append(word)
            continue
        known = _known(name, word, takes)
        target = OTHER_NAMES.get(known, known)
        meant.changed |= word.partition("=")[0] != f"--{target}"
        given = [value] if equals else _take_values(rest, target if target in takes else known, takes)
        _add_option(meant, known, target, given, takes)
    _take_missing(meant)
    return meant


def _known(name: str, word: str, takes: Mapping[str, bool]) -> str:
    """Return an option's name without slips: case, underscores, one hyphen instead of two, letters."""
    spelt = name.replace("_", "-").casefold()
    if len(spelt) == 1 and not word.startswith("--"):
        return _SHORT.get(spelt, spelt)
    if spelt in takes or spelt in OTHER_NAMES or has_answer(spelt):
        return spelt
    return misspelt(spelt, [*takes, *OTHER_NAMES]) or spelt


def _take_values(rest: list[str], name: str, takes: Mapping[str, bool]) -> list[str]:
    """Take the words after an option that are its values: of a list several, if they look alike."""
    if name in takes and not takes[name]:
        return []
    if name not in takes and name != DATA and _NO_VALUE.fullmatch(name):
        return []
    found: list[str] = []
    while rest and not _IS_OPTION.match(rest[0]):
        if found and not (name in _LISTS and (rest[0].isdecimal() or rest[0] in ("text", "latents", *_ENCODE))):
            break
        found.append(rest.pop(0))
    return found


def _add_option(meant: Meant, known: str, target: str, given: list[str], takes: Mapping[str, bool]) -> None:
    if target == DATA:
        meant.data += given
    elif known in _SPECIAL:
        _SPECIAL[known](meant, ",".join(given))
        meant.changed = True
    elif target in takes:
        values = [_mended(target, ",".join(given))] if takes[target] else []
        meant.changed |= values != given
        if takes[target] and not given:
            meant.unknown.append(f"--{known}")
        else:
            meant.add(target, *values)
    elif known in _IS_SO or _OF_TRAINING.fullmatch(known):
        why = _IS_SO.get(known, "it is for training")
        meant.notes.append(f"--{known} is not needed: {why}")
        meant.changed = True
    else:
        meant.unknown.append(f"--{known}")


def _whole(value: str) -> int:
    return int(value) if value.isdecimal() else 1


def _add_policy(meant: Meant, **more: Any) -> None:
    before = next((values[0] for name, values in meant.options if name == "captions"), "{}")
    policy = json.loads(before) if before.startswith("{") else {"choose": before}
    meant.add("captions", json.dumps({**policy, **more}, ensure_ascii=False))


def _skip_layers(meant: Meant, value: str) -> None:
    # Trainers count the last layer as 1, encode_prompt counts the layers that are left out.
    layers = int(value) - 1 if value.isdecimal() else 1
    if layers > 0:
        meant.add("encode-arg", f"clip_skip={layers}")
    meant.notes.append("trainers' clip skip of 2 is clip_skip=1 of diffusers: the last layer is left out")


_SPECIAL: Final[Mapping[str, Callable[[Meant, str], None]]] = {
    "trigger-word": lambda meant, value: _add_policy(meant, prefix=f"{value}, "),
    "caption-prefix": lambda meant, value: _add_policy(meant, prefix=f"{value} "),
    "keep-tokens": lambda meant, value: _add_policy(meant, shuffle_tags=True, keep_tokens=_whole(value)),
    **dict.fromkeys(("shuffle-caption", "shuffle-tokens"), lambda meant, _value: _add_policy(meant, shuffle_tags=True)),
    "center-crop": lambda meant, _value: meant.add("crop", "center"),
    "random-crop": lambda meant, _value: meant.add("crop", "random"),
    "clip-skip": _skip_layers,
    **dict.fromkeys(("device-id", "gpu-id", "gpu-ids"), lambda meant, value: meant.add("device", f"cuda:{value.partition(',')[0]}")),
    **dict.fromkeys(("num-repeats", "repeats"), lambda meant, value: setattr(meant, "repeats", _whole(value))),
    "validation-prompt": lambda meant, value: meant.add("prompts", json.dumps([value], ensure_ascii=False)),
}
"""What adds an option of other tools that is one of ours with another value."""


def _mended(name: str, value: str) -> str:
    if name == "encode":
        return ",".join(dict.fromkeys(_ENCODE.get(one.strip().casefold(), one.strip()) for one in value.split(",")))
    if name == "device" and value.casefold() in ("gpu", "nvidia"):
        return "cuda"
    if name == "resolution" and (found := _WIDTH_HEIGHT.fullmatch(value)) is not None:
        return str(round((int(found[1]) * int(found[2])) ** 0.5))
    if name in ("resolution", "frames", "batch-size") and (found := _PIXELS.fullmatch(value)) is not None:
        return found[1]
    if name.endswith("-dtype"):
        return {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(value, value)
    return value


def _take_missing(meant: Meant) -> None:
    """Take words after DATA as the model and the store, if these are missing."""
    wanted = [name for name in ("model", "store") if not meant.has(name)]
    if meant.has("again"):
        wanted = ["store"] if "store" in wanted else []
    few = 0 if meant.has("again") or meant.has("sources") or meant.has("config") else 1
    if wanted and len(meant.data) == few + len(wanted):
        found = [meant.data.pop() for _name in wanted]
        for name, value in zip(wanted, reversed(found), strict=True):
            meant.add(name, value)
        meant.changed = True


def to_copy(line: Sequence[str], *, is_certain: bool = False) -> str:
    """Return the end of an error: a line to copy, and what it leaves out. `line` begins with a command, in whose place `precompute` stands.

    Empty if something of it is not understood, or if nothing would be changed, unless the command itself is (`is_certain`).
    """
    meant = understand(line[1:])
    notes = "".join(f"; {note}" for note in meant.notes)
    before = [name for name, _values in meant.options]
    found = meant.line()
    is_other = meant.changed or is_certain or line[0] != "precompute" or before != [name for name, _values in meant.options]
    found = found if is_other else None
    return f"{notes}. To copy: {found}" if found is not None else notes


def has_answer(name: str) -> bool:
    """Whether `to_copy` says what becomes of another tool's option."""
    return name in _IS_SO or name in _SPECIAL or _OF_TRAINING.fullmatch(name) is not None


def check_paths(request: "PrecomputeRequest") -> None:
    """Raise BadInput for DATA or a model that is not there, if something of nearly this name is; the message has the line to copy."""
    from cachestore.sources.files import IMAGE_SUFFIXES

    for name, path, change in _paths(request):
        near = _near(path, is_slip=name == "--model" and "/" not in path)
        if near is not None:
            raise BadInput(f"{name} {path} does not exist; did you mean {near!r}? To copy: {_line_of(replace(request, **change(near)))}")
        if name == DATA and Path(path).suffix.lower() in IMAGE_SUFFIXES and Path(path).is_file():
            whole = replace(request, data=str(Path(path).parent), sources=())
            raise BadInput(f"{path} is one picture, and DATA is the folder of all. To copy: {_line_of(whole)}")
    _check_store(request)


def _check_store(request: "PrecomputeRequest") -> None:
    """Raise BadInput for a store's folder with other files: it may be DATA, or the two may be in each other's place."""
    store = Path(request.store)
    if (store / MARKER).exists() or not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return
    if request.data and (Path(request.data) / MARKER).exists():
        meant = replace(request, data=request.store, store=request.data)
        raise BadInput(f"{request.data} is a store, and {store} is not: DATA comes first. To copy: {_line_of(meant)}")
    beside = store / "cache" if store.is_dir() else store.parent / "cache"
    held = first_of(sorted(one.name for one in store.iterdir())) if store.is_dir() else "a file"
    refused = f"{store.absolute()} is not a store and not an empty folder (it holds {held}): pass another folder, which may be inside DATA"
    raise BadInput(f"{refused}. To copy: {_line_of(replace(request, store=str(beside)))}")


def _line_of(request: "PrecomputeRequest") -> str:
    from cachestore.jobs.plan.typed import in_line, typed

    return in_line(["cachestore", "precompute", *typed(request)])


def _paths(request: "PrecomputeRequest") -> "Iterator[tuple[str, str, Callable[[str], dict[str, Any]]]]":
    if request.data:
        yield DATA, request.data, lambda near: {"data": near}
    for number, source in enumerate(request.sources):
        others = request.sources

        def change(near: str, number: int = number, others: tuple[Any, ...] = others) -> dict[str, Any]:
            return {"sources": tuple(replace(one, data=near) if at == number else one for at, one in enumerate(others))}

        yield DATA, source.data, change
    yield "--model", request.model, lambda near: {"model": near}


def _near(path: str, *, is_slip: bool) -> str | None:
    """Return a path that is there and has nearly the same name; None if the path itself is there, or none is near.

    With `is_slip` names must differ by a letter: the path may be a hub id.
    """
    asked = Path(path)
    if asked.exists() or not path or any(letter in path for letter in "{*"):
        return None
    try:
        names = [one.name for one in asked.parent.iterdir()]
    except OSError:
        return None
    found = misspelt(asked.name, names) if is_slip else nearest(asked.name, names)
    return None if found is None else str(asked.parent / found)
