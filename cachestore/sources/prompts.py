"""Files with prompts and negative prompts for validation: `.txt`, `.json` or `.jsonl`.

Each is read as pairs of (prompt, negative prompt). A negative prompt that is not given is the empty text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from cachestore.core.arguments import refuse_caption
from cachestore.core.errors import BadInput
from cachestore.sources.captions import read_text
from cachestore.sources.tables import json_row

Prompts = tuple[tuple[str, str], ...]
"""(prompt, negative prompt) of each."""
PROMPT_SUFFIXES: Final = (".txt", ".json", ".jsonl")
_SETTING: Final = re.compile(r"\s--(?=[a-z]+(?:\s|$))")
"""Where a setting begins in a line of a `.txt`, as in the sample prompts of sd-scripts and musubi-tuner."""
_NEGATIVE: Final = "n"
"""The setting with the negative prompt."""
_FIELDS: Final = ("prompt", "negative_prompt")


def read_prompts(path: Path) -> Prompts:
    """Return the prompts of a file, each once, in order. Raises BadInput."""
    if path.suffix.lower() not in PROMPT_SUFFIXES:
        raise BadInput(f"{path} is not a file of prompts: its name must end in {', '.join(PROMPT_SUFFIXES)}")
    try:
        text = read_text(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; check the path") from error
    lines = ((f"{path}, line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    match path.suffix.lower():
        case ".txt":
            found: list[tuple[str, str]] = []
            for where, line in lines:
                prompt, *settings = _SETTING.split(line)  # of the settings, `--n` has the negative prompt; others are for pictures
                parts = (setting.partition(" ") for setting in settings)
                negative = next((text.strip() for name, _space, text in parts if name == _NEGATIVE), "")
                found += [] if line.startswith("#") else [as_pair((prompt.strip(), negative), where)]
        case ".jsonl":
            found = [as_pair(json_row(line, where), where) for where, line in lines]
        case _:
            found = list(_from_json(text, path))
    if not found:
        raise BadInput(f"{path} has no prompt: write one on each line")
    return tuple(dict.fromkeys(found))


def as_prompts(given: Iterable[object]) -> Prompts:
    """Return the pairs for texts, pairs, or objects with the fields `prompt` and `negative_prompt`, each once. Raises BadInput."""
    return tuple(dict.fromkeys(as_pair(one, f"prompt {number}") for number, one in enumerate(given)))


def as_pair(given: object, where: str) -> tuple[str, str]:
    """Return (prompt, negative prompt) for a text, a pair or an object; `where` begins the message of the BadInput that it raises."""
    pair: Sequence[object] = ()
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, object]", given)
        pair = [fields.get(name) or "" for name in _FIELDS] if _FIELDS[0] in fields else ()
    elif isinstance(given, str):
        pair = (given, "")
    elif isinstance(given, list | tuple):
        pair = cast("Sequence[object]", given)
    if len(pair) != len(_FIELDS) or not all(isinstance(text, str) for text in pair):
        raise BadInput(f"{where} must be a text, or an object with the fields prompt and negative_prompt, not {given!r:.200}")
    for text in cast("Sequence[str]", pair):
        refuse_caption(text, where)
    return cast("tuple[str, str]", tuple(pair))


def _from_json(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """The prompts in a list, or in an object that names each, as SimpleTuner's prompt library."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON ({error}): correct it, or write one prompt a line into a .txt file") from error
    if not isinstance(found, list | dict):
        raise BadInput(f"{path} must hold a list of prompts, or an object with a prompt for each name, not {found!r:.200}")
    several = cast("Mapping[str, object]", found).items() if isinstance(found, dict) else enumerate(cast("list[object]", found))
    yield from (as_pair(one, f"{path}, prompt {name}") for name, one in several)
