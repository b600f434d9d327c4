"""Make a row for a pipeline that has none in the table, from its signatures and the source of `encode_prompt`. Imports diffusers.

Such a row assumes little: tensors and masks are stored whole, since it cannot be seen here whether the denoiser attends to padding.
The rest is checked when the model is loaded. What is not understood is refused: several layers side by side, components that change text
after `encode_prompt`, pictures, and arguments without a plain default.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, canonical
from cachestore.encode.families import lookup as families
from cachestore.encode.families.row import MAX_LENGTH_ARG, TextFamily, plain_forms

_OF_THE_BATCH = {"self", "prompt", "device", "dtype", "batch_size", "lora_scale", "do_classifier_free_guidance"}
_MOST_TOKENS = 512
_AFTER_TEXT = re.compile(r"connectors|.*projection.*|language_model|vision_language_encoder")
"""Components that change embeddings after the text encoder, by name."""
_LAYERS = "hidden_states"


def find_family(class_name: str, index: Mapping[str, Json]) -> TextFamily:
    """Return a row for a pipeline class of diffusers. `index` is its model_index.json. Raises BadInput, which says what is missing."""
    pipeline = _pipeline_class(class_name)
    returns = _returned_names(pipeline, class_name)
    kept = [name for name in returns if name is not None]
    if "prompt_embeds" not in kept:
        _refuse(class_name, f"encode_prompt returns {', '.join(map(str, returns))}, but no prompt_embeds")
    parameters = inspect.signature(pipeline.__init__).parameters
    components = tuple(name for name in parameters if name.startswith(("text_encoder", "tokenizer")) and _is_there(name, index))
    if after := [name for name in parameters if _AFTER_TEXT.fullmatch(name) and _is_there(name, index)]:
        _refuse(class_name, f"it also has {', '.join(after)} to make its embeddings, which encode_prompt alone does not show")
    if _stacks_layers(pipeline):
        _refuse(class_name, "it puts several layers of its text encoder side by side, which takes many times the bytes of one")
    tokenizers = [name for name in components if name.startswith("tokenizer")]
    if not tokenizers or len(tokenizers) == len(components):
        _refuse(class_name, f"it has no tokenizer and text encoder among its components ({', '.join(components) or 'none of the kind'})")
    args = _arguments(pipeline, class_name)
    limit = args.get(MAX_LENGTH_ARG)
    return TextFamily(
        name=class_name,
        pipeline=class_name,
        components=components,
        tokenizer=tokenizers[0],
        max_tokens=limit if isinstance(limit, int) else _MOST_TOKENS,
        returns=returns,
        outputs=plain_forms(*kept),
        mask=next((name for name in kept if "mask" in name), None),
        args=args,
        settings=tuple(name for name in parameters if isinstance(index.get(name), bool | int | float | str)),
        cleaners=("diffusers",),  # it may clean captions: this was not examined
        is_found=True,
    )


def _pipeline_class(class_name: str) -> Any:
    try:
        found = getattr(importlib.import_module("diffusers"), class_name, None)
        has_encode_prompt = hasattr(found, "encode_prompt")
    except ImportError as error:  # diffusers exports a placeholder if a package is missing
        _refuse(class_name, str(error).strip().splitlines()[0])
    except RuntimeError as error:  # or it fails to import the pipeline; the last line has the cause
        _refuse(class_name, f"diffusers cannot import it: {str(error).strip().splitlines()[-1]}")
    if found is None:
        return families.text_family(class_name)  # raises BadInput, which lists the known ones
    if not has_encode_prompt:
        _refuse(class_name, "it has no encode_prompt")
    return found


def _returned_names(pipeline: Any, class_name: str) -> tuple[str | None, ...]:
    """Return the names in the last `return` of `encode_prompt`; None for each value that is no plain name of embeddings or of a mask."""
    function = ast.parse(textwrap.dedent(inspect.getsource(pipeline.encode_prompt))).body[0]
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    if not returned:
        _refuse(class_name, "encode_prompt returns nothing")
    last = max(returned, key=lambda value: value.lineno)
    values = last.elts if isinstance(last, ast.Tuple) else [last]
    names = [value.id if isinstance(value, ast.Name) else "" for value in values]
    return tuple(name if ("embed" in name or "mask" in name) and not name.startswith("negative") else None for name in names)


def _is_there(name: str, index: Mapping[str, Json]) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _stacks_layers(pipeline: Any) -> bool:
    """Return whether a method that encodes prompts uses `.hidden_states` in another way than taking single ones of them."""
    functions = [member for name, member in inspect.getmembers(pipeline, inspect.isfunction) if "prompt" in name or "text" in name]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(function))) for function in functions]
    return any(_all_layers(tree, is_looping=False) for tree in trees)


def _all_layers(node: ast.AST, *, is_looping: bool) -> bool:
    is_looping = is_looping or isinstance(node, ast.ListComp | ast.GeneratorExp)
    children: Iterator[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Subscript) and _is_layers(node.value) and not is_looping:
        children = iter([node.slice])
    return any(_is_layers(child) or _all_layers(child, is_looping=is_looping) for child in children)


def _is_layers(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == _LAYERS
    return isinstance(node, ast.Attribute) and node.attr == _LAYERS


def _arguments(pipeline: Any, class_name: str) -> dict[str, Json]:
    """Return what `__call__` passes to `encode_prompt` by default. Raises BadInput if an argument has no plain default."""
    called = inspect.signature(pipeline.__call__).parameters
    given: dict[str, Json] = {}
    for name, parameter in inspect.signature(pipeline.encode_prompt).parameters.items():
        # another encoder's prompt, a negative one, ready embeddings, or a number of copies
        is_of_the_prompt = name.startswith(("prompt_", "negative", "pooled", "num_")) and name != "prompt_template"
        if name in _OF_THE_BATCH or is_of_the_prompt or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if "image" in name or "video" in name:
            _refuse(class_name, f"its text encoder sees pictures too (encode_prompt takes {name})")
        default = called[name].default if name in called else parameter.default
        given[name] = list(default) if isinstance(default, tuple) else default
        if default is parameter.empty or not _is_json(given[name]):
            _refuse(class_name, f"encode_prompt needs {name}, which has no plain default")
    return given


def _is_json(value: Any) -> bool:
    try:
        canonical(value)
    except BadInput:
        return False
    return True


def _refuse(class_name: str, what: str) -> NoReturn:
    raise BadInput(
        f"{class_name} has no row in the table of families (docs/families.md), and cachestore cannot find out how to use it:"
        f" {what}. Pass a TextFamily of your own"
    )
