"""Says with which options a data set was made, if a run asks for others: as words to add to the command."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Final, cast

from cachestore.core.inputs import BUCKET_MAX, BUCKET_MIN, BUCKETS, PIXELS, RESOLUTIONS
from cachestore.core.keys import Json
from cachestore.core.spelling import is_typed, option
from cachestore.core.words import first_of, listed
from cachestore.encode.resamplers import RESAMPLERS
from cachestore.jobs.options import CHOSEN, LATENTS, PrecomputeRequest, read_value
from cachestore.jobs.typed import in_line, typed_option
from cachestore.storage.catalog import Catalog

_MODEL: Final = ("model", "vae", "text_encoder", "revision", "variant")
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "components": _MODEL,
    "dtype": ("vae_dtype",),
    "encode_args": ("encode_arg",),
    "files": _MODEL,
    "max_tokens": ("encode_arg",),
    "outputs": ("latents",),
    "padding": ("encode_arg",),
    "pipeline": _MODEL,
    "roles": _MODEL,
    "scales": _MODEL,
    "settings": _MODEL,
    "transform": ("resample",),
    "crop": ("crop",),
    "seed": ("crop_seed",),
    "step": ("bucket_step", "buckets"),
    "upscale": ("no_upscale",),
    BUCKETS: ("buckets",),
    RESOLUTIONS: ("sources", "resolution"),
}
"""The options that decide a setting of a recipe or of a column. A setting that is not here has the name of its option."""
_FIELDS_OF_TEXT: Final[Mapping[str, tuple[str, ...]]] = {"dtype": ("text_dtype",), "outputs": ("encode", *_MODEL), "pictures": _MODEL}
_OF_THIS_VERSION: Final = ("kind", "version", "packages")
"""Settings that no option decides."""


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """A setting of an encoder that was another when a data set was made."""

    encoder: str
    setting: str
    """Its name in the recipe (`transform.pixels`) or among the options of a column (`resolution`)."""
    before: Json
    now: Json


def refusal(previous: Catalog, differences: Sequence[OtherSetting], asked: Mapping[str, Json]) -> str:
    """Return the sentence that refuses a run with other settings than `previous`: what to add, to leave out, or to pass instead.

    `asked` are the options of the run, as a catalog records them; with none, the settings themselves say what was used.
    """
    known = {one.name: one for one in fields(PrecomputeRequest)}
    add: dict[str, Any] = {}
    leave_out: dict[str, None] = {}
    others: dict[str, None] = {}
    for encoder in dict.fromkeys(one.encoder for one in differences):
        hints: Mapping[str, Any] = previous.request.get(encoder) or {}
        for one in (one for one in differences if one.encoder == encoder):
            changed = {name: value for name, value in _options_of(one, hints, asked, known) if name not in add}
            add |= {name: value for name, value in changed.items() if value not in (None, False)}
            leave_out |= dict.fromkeys(name for name, value in changed.items() if value in (None, False))
            others |= {} if changed or any(name in add or name in leave_out for name in _fields_of(one)) else {_in_words(one, hints): None}
    if "buckets" in (*add, *leave_out):  # what was chosen for these buckets, or for those before, is chosen again
        leave_out = {name: None for name in leave_out if name not in CHOSEN}
        add = {name: value for name, value in add.items() if name not in CHOSEN or name == "resample"}
    made = [f"with {' '.join(_spelled(name, value) for name, value in add.items())}"] if add else []
    made += [f"without {listed(map(option, leave_out))}"] if leave_out else []
    made += [f"with {first_of(others)}"] if others else []
    todo = [f"use {'this' if len(add) == 1 else 'these'}"] if add else []
    todo += [f"leave {'it' if len(leave_out) == 1 else 'these'} out"] if leave_out else []
    advice = listed(todo).capitalize() or "Pass the model that it was made with"
    advice += " to encode only what changed"
    if not todo and all(one.setting.partition(".")[0] in _OF_THIS_VERSION for one in differences):
        advice = "Install those again to encode only what changed"
    advice += f"; {option('replace', value=True)} takes the new settings and encodes what differs; another {option('name')} keeps both"
    return f"the data set {previous.name!r} was made {listed(made)}. {advice}"


def _spelled(name: str, value: Any) -> str:
    """Return an option as `option` does; on a command line so that it can be copied."""
    return in_line(typed_option(name, value)) if is_typed() else option(name, value)


def _fields_of(one: OtherSetting) -> tuple[str, ...]:
    name = one.setting.partition(".")[0]
    if one.encoder == "text" and name in _FIELDS_OF_TEXT:
        return _FIELDS_OF_TEXT[name]
    return _FIELDS.get(name, (name,))


def _options_of(
    one: OtherSetting, hints: Mapping[str, Any], asked: Mapping[str, Json], known: "Mapping[str, Field[Any]]"
) -> Iterable[tuple[str, Any]]:
    """Yield the options that explain a difference, with the values they had. Without hints of both runs, the setting gives the value."""
    names = [name for name in _fields_of(one) if name in known]
    recorded = [name for name in names if name in asked and "data" in hints]
    for name in recorded:
        default = known[name].default
        before = hints.get(name, None if default is MISSING else default)
        value = None if before in (None, (), [], {}) else read_value(known[name], before, name)
        if value != (None if asked[name] in ((), [], {}) else _read(known[name], asked[name])):
            yield name, value
    if not recorded and (found := _from_setting(one)) is not None and found[0] in known:
        yield found


def _read(one: "Field[Any]", value: Json) -> Any:
    return None if value is None else read_value(one, value, one.name)


def _from_setting(one: OtherSetting) -> tuple[str, Any] | None:
    """The option and the value that a setting itself shows; None if it shows none."""
    match one.setting:
        case "dtype":
            return ("text_dtype" if one.encoder == "text" else "vae_dtype"), one.before
        case "outputs" if one.encoder == LATENTS:
            return "latents", next(iter(one.before or ()), None)
        case "transform.pixels":
            return next((("resample", name) for name, row in RESAMPLERS.items() if row.pictures == one.before), None)
        case "upscale":
            return "no_upscale", one.before is False
        case setting if setting in (
            "resolution",
            "crop",
            "variants",
            "flip",
            "frames",
            "fps",
            "clips",
            "seed",
            "step",
            BUCKETS,
            BUCKET_MIN,
            BUCKET_MAX,
            PIXELS,
        ):
            value = one.before
            return _FIELDS.get(setting, (setting,))[0], tuple(cast("list[Json]", value)) if isinstance(value, list) else value
        case _:
            return None


def _in_words(one: OtherSetting, hints: Mapping[str, Any]) -> str:
    """Describe a difference that no option of the two runs explains."""
    kind, _dot, name = one.setting.partition(".")
    match kind:
        case "files":
            model = f" of {hints['model']}" if "model" in hints else ""
            return f"other files{model} than are there now ({name or one.encoder})"
        case "packages":
            return f"{name} {one.before or '(not installed)'}, which is {one.now or 'not installed'} now"
        case "kind" | "version":
            return f"another version of cachestore, whose {one.encoder} values differ"
        case "components" | "pipeline" | "settings" | "scales":
            return f"another model ({name or kind} {one.before}, now {one.now})"
        case _:
            return f"{one.setting} {one.before}, which is {one.now} now"
