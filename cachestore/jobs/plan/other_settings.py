"""Says with which options a data set was made, if a run asks for others: as words to add to the command."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from cachestore.core.inputs import BUCKETS, RESOLUTIONS
from cachestore.core.keys import Json
from cachestore.core.spelling import is_typed, option
from cachestore.core.words import first_of, listed
from cachestore.jobs.plan.options import CHOSEN, PrecomputeRequest, read_value
from cachestore.jobs.plan.typed import in_line, typed_option
from cachestore.store.format.catalog import Catalog

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

    `asked` are the options of the run, as a catalog records them; with none, the settings themselves are named.
    """
    add: dict[str, Any] = {}
    leave_out: dict[str, None] = {}
    others: dict[str, None] = {}
    for encoder in dict.fromkeys(one.encoder for one in differences):
        hints: Mapping[str, Any] = previous.request.get(encoder) or {}
        for one in (one for one in differences if one.encoder == encoder):
            changed = {name: value for name, value in _options_of(one, hints, asked) if name not in add}
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


def _options_of(one: OtherSetting, hints: Mapping[str, Any], asked: Mapping[str, Json]) -> Iterator[tuple[str, Any]]:
    """Yield the options that explain a difference, with the values they had. None if the catalog does not say how it was made."""
    known = {field.name: field for field in fields(PrecomputeRequest)}

    def read(name: str, value: Json) -> Any:
        return None if value in (None, [], {}) else read_value(known[name], value, name)

    for name in _fields_of(one) if "data" in hints else ():
        if name in asked:
            before = read(name, hints.get(name))
            if before != read(name, asked[name]):
                yield name, before


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
