"""Call text encoders: through their pipeline's `encode_prompt`, or a transformers model alone. Imports torch.

The result is always treated alike: rows of padding are dropped, joined tensors are split, and each entry's tensors are cut out of the
batch. Before the first batch a pipeline is probed: if a caption gives other embeddings in a batch than alone, captions are encoded one by
one, and the log says so.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Key, canonical, digest_bytes
from cachestore.core.spelling import option
from cachestore.encode.batching.budget import Budget
from cachestore.encode.batching.outputs import Entries, Made, difference, fetch, make_sound, tolerance
from cachestore.encode.batching.transfer import Took, Transfer, each, ignore
from cachestore.encode.batching.unit import Result
from cachestore.encode.families.lookup import form_names
from cachestore.encode.families.row import CONNECTORS, DEFAULT_OF_CALL, MAX_LENGTH_ARG, PAST_LIMIT, SKIP_ARG, ZERO_ROWS, TextFamily
from cachestore.encode.models.folders import Component
from cachestore.encode.models.modules import (
    DTYPES,
    Foreign,
    build_pipeline,
    caching_configs,
    clip_as_it_was,
    load_image_processor,
    load_module,
    load_processor,
    load_tokenizer,
    without_cache,
)
from cachestore.encode.models.setup import (
    Caption,
    OwnCaptions,
    Padded,
    Payload,
    TextSetup,
    WithPictures,
    caption_at,
    padded_length,
    pooled_width,
    text_width,
)
from cachestore.encode.text.token_memory import TokenMemory, keep_prompts, remember

Batch = Sequence[tuple[Key, Payload]]
Call = Callable[[Sequence[Any]], Mapping[str, Any]]
"""Makes outputs from payloads, under the family's names: batched tensors, lists of tensors, or None for a mask of all ones."""
Entry = Made
_REAL = " real "
"""Before an output's name: its rows that are not padding."""
CPU_TOKENS, GPU_TOKENS = 2_048, 65_536
"""How many tokens, with padding, a batch has on a CPU, and at most on a GPU."""
PROBES = ("", "a cat", 'a photograph of a red car in front of a blue house with a "SIGN", highly detailed')
"""Captions to probe with: empty, short, and long with quoted text, for which HunyuanVideo 1.5 has a second encoder."""
_log = logging.getLogger(__name__)


def text_budget(device: torch.device) -> Budget:
    """Return the batch size to begin with and the largest one, in tokens with padding."""
    return Budget(CPU_TOKENS, CPU_TOKENS, 32) if device.type == "cpu" else Budget(GPU_TOKENS // 8, GPU_TOKENS, 256)


class TextModules:
    """The loaded modules of a text encoder. Use it from one thread."""

    def __init__(self, setup: TextSetup, device: torch.device, memories: Mapping[str, TokenMemory]) -> None:
        """Load and probe the pipeline. `memories` have tokens that were read before, by tokenizer. Raises BadInput if it is of no use."""
        parts = {name: load_part(component, setup, device) for name, component in setup.components.items()}
        self._setup = setup
        self._family = setup.family
        self._dtype = DTYPES[setup.dtype]
        self._transfer = Transfer(device)
        self._modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        self._caching = caching_configs(self._modules)
        self._may_be_flat = _may_be_flat(setup.family)
        self.is_single = False
        """Whether captions are encoded one by one."""
        self.is_whole = False
        """Whether captions are always padded to the limit, as the pipeline itself does it."""
        self.found_bytes: int | None = None
        """The bytes of each entry, as probed for a pipeline without a row; None if there is a row."""
        if setup.family.pipeline is None:
            self._call: Call = _model_call(parts, setup.max_tokens, device)
            return
        tokenizers = {name: part for name, part in parts.items() if name.startswith("tokenizer")}
        for name, tokenizer in tokenizers.items():
            remember(tokenizer, memories.get(name) or TokenMemory())
        if setup.family.called:
            self._call = _parts_call(parts, setup, device)
        else:
            pipeline = build_pipeline(setup.family.pipeline, parts, setup.settings, setup.asked, setup.family.stand_ins)
            keep_prompts(pipeline, tokenizers.values())
            self._call = _pipeline_call(pipeline, setup, device)
        if setup.family.pictures is not None:  # a probe would need pictures
            self.is_single = True
        else:
            self._probe(setup, device)

    def _probe(self, setup: TextSetup, device: torch.device) -> None:
        alone, failed = self._probed()
        if setup.family.is_found:
            self._check_found(list(alone.values()))
            self.found_bytes = max(sum(tensor.nbytes for tensor in entry.values()) for entry in alone.values())
        if reason := failed or self._why_single(alone, device):
            self.is_single = True
            _log.warning("%s: %s; captions are encoded one by one", setup.family.pipeline, reason)
        if setup.is_bucketed and (reason := self._why_whole(alone, device)):
            self.is_whole = True
            _log.warning("%s: %s; captions are padded to the limit", setup.family.pipeline, reason)

    def submit(self, batch: Batch, took: Took = ignore) -> Result:
        """Begin to encode captions. The result raises EncodeFailed, which names the first entry that is faulty even in float32."""
        begun = self._begin(batch, took)
        return lambda: make_sound(
            "the text encoder", batch, begun(), lambda some: self._begin(some)(), self._modules, may_be_flat=self._may_be_flat
        )

    def _begin(self, batch: Batch, took: Took = ignore) -> "Callable[[], Entries]":
        together = [[pair] for pair in batch] if self.is_single else [batch]
        parts = (self._submitted([payload for _, payload in pairs]) for pairs in together)
        return self._transfer.begin([key for key, _ in batch], parts, took)

    def _submitted(self, payloads: Sequence[Payload]) -> "Callable[[], list[Entry]]":
        length = max((payload.length for payload in payloads if isinstance(payload, Padded)), default=self._setup.max_tokens)
        whole = [payload.caption if isinstance(payload, Padded) else payload for payload in payloads]
        if self.is_whole or length == self._setup.max_tokens:
            return self._called(whole)
        begun = self._called(payloads)

        def finish() -> list[Entry]:
            entries = begun()
            # an entry without padding may have been cut, as its caption had more rows than were counted
            full = [index for index, entry in enumerate(entries) if self._rows(entry) >= length]
            again = dict(zip(full, self._called([whole[index] for index in full])(), strict=True)) if full else {}
            return [again.get(index, entry) for index, entry in enumerate(entries)]

        return finish

    def _called(self, payloads: Sequence[Payload]) -> "Callable[[], list[Entry]]":
        with torch.inference_mode(), without_cache(self._caching):
            begun = fetch(self._transfer, self._converted(self._call(payloads)), self._family.outputs, len(payloads))

        def finish() -> list[Entry]:
            returned, finite = begun()
            return [self._entry(returned, row, is_finite=one) for row, one in enumerate(finite)]

        return finish

    def _converted(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """What a batch's entries are cut from, in the dtype that is stored, with the rows of ZERO_ROWS outputs that are not padding."""

        def to_dtype(tensor: Tensor) -> Tensor:
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        converted = {name: each(value, to_dtype) for name, value in returned.items()}
        for name, trim in self._family.trims.items():
            if trim == ZERO_ROWS:  # before the conversion, which may round a number to zero
                converted[_REAL + name] = each(returned[name], lambda tensor: tensor.ne(0).any(dim=-1))
        return converted

    def _tried(self, groups: Iterable[Sequence[Payload]], what: str) -> tuple[list[Entry], str]:
        """Encode payloads group by group. Returns their entries and "", or no entries and the error in words."""
        try:
            return [entry for payloads in groups for entry in self._submitted(payloads)()], ""
        except BadInput:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline may raise anything; other captions, or captions alone, may work
            return [], f"{what} in {type(error).__name__} ({error})"

    def _probed(self) -> tuple[dict[str, Entry], str | None]:
        """Encode each caption of PROBES alone. Returns the entries and the first error in words. Raises BadInput if all of them fail."""
        alone: dict[str, Entry] = {}
        failed: list[str] = []
        for caption in PROBES:
            made, reason = self._tried([[caption]], f"the caption {caption[:40]!r} ends")
            if made:
                alone[caption] = made[0]
            else:
                failed.append(reason)
        if not alone:
            raise BadInput(
                f"{self._family.pipeline} was loaded and cannot encode: {failed[-1]}; {len(failed) - 1} other captions fail too. Check the"
                " model with a script of diffusers"
            )
        return alone, failed[0] if failed else None

    def _why_single(self, alone: Mapping[str, Entry], device: torch.device) -> str | None:
        """Return why captions cannot share a batch; None if they can. `alone` has the entries of captions that were encoded alone."""
        batch = [caption for caption in alone if caption not in self._family.alone]
        if self._family.length_step is not None:
            batch = batch[:1] * 2  # captions of different lengths never share a batch
        together, reason = self._tried([batch], f"a batch of {len(batch)} captions ends")
        return reason or self._first_difference(alone, batch, together, device, "in a batch than alone")

    def _why_whole(self, alone: Mapping[str, Entry], device: torch.device) -> str | None:
        """Return why captions cannot be padded to less than the limit; None if they can."""
        limit = self._setup.max_tokens
        batch = [caption for caption in alone if caption not in self._family.alone]
        padded = [Padded(caption, padded_length(min(self._rows(alone[caption]) + 1, limit), limit)) for caption in batch]
        together = [[one] for one in padded] if self.is_single else [padded]
        entries, reason = self._tried(together, "captions that are padded to less than the limit end")
        return reason or self._first_difference(alone, batch, entries, device, "when it is padded to less than the limit")

    def _first_difference(
        self, alone: Mapping[str, Entry], captions: Sequence[str], entries: Sequence[Entry], device: torch.device, when: str
    ) -> str | None:
        bound = tolerance(self._setup.dtype, device)
        for caption, entry in zip(captions, entries, strict=True):
            if found := difference(alone[caption], entry, bound):
                return f"the caption {caption[:40]!r} gives another {found} {when}"
        return None

    def _rows(self, entry: Entry) -> int:
        return entry[form_names(self._family.outputs["prompt_embeds"])[0]].shape[0]

    def _check_found(self, entries: Sequence[Entry]) -> None:
        widths = [text_width(self._setup.components[name].config) for name in self._family.encoders]
        found = entries[0]["prompt_embeds"].shape
        if len(found) != 2 or found[-1] not in {*widths, sum(widths)}:
            raise BadInput(
                f"{self._family.pipeline} has no row in the table of families (docs/families.md), and its prompt_embeds have the shape"
                f" {list(found)} for a caption, but the rows of its text encoders have the widths {widths}: cachestore cannot tell what"
                " they are. Pass a TextFamily of your own"
            )
        for name in entries[0]:
            lengths = sorted({tuple(entry[name].shape) for entry in entries})
            if len(lengths) > 1:
                raise BadInput(
                    f"{self._family.pipeline} has no row in the table of families (docs/families.md), and the length of its"
                    f" {name} depends on the caption ({lengths[0]}, {lengths[-1]}): cachestore cannot tell whether the denoiser"
                    " attends to padding. Pass a TextFamily of your own"
                )

    def _entry(self, returned: Mapping[str, Any], row: int, *, is_finite: bool) -> Entry:
        """Cut one entry out of its batch, if possible without a copy."""
        outputs = self._family.outputs.items()
        pieces = [self._apart(name, form, self._trimmed(name, returned, row)) for name, form in outputs]
        return Made({stored: piece for some in pieces for stored, piece in some.items()}, is_finite=is_finite)

    def _trimmed(self, name: str, returned: Mapping[str, Any], row: int) -> Tensor:
        tensor: Tensor = returned[name][row]
        trim = self._family.trims.get(name)
        if trim is None:
            return tensor
        if trim == ZERO_ROWS:
            real = returned[_REAL + name][row].nonzero()
            return tensor[: int(real[-1]) + 1 if len(real) else 0]
        if trim == PAST_LIMIT:
            return tensor[: self._setup.max_tokens]
        masks = returned[trim]
        if masks is None:  # Qwen-Image returns none if no row is padding
            return tensor
        if masks.ndim == 1:  # Kandinsky's cumulated lengths
            return tensor[: int(masks[row + 1] - masks[row])]
        # AuraFlow's is repeated for each number of a row
        return _masked(tensor, masks[row].reshape(tensor.shape[0], -1)[:, 0].bool())

    def _apart(self, output: str, form: Json, tensor: Tensor) -> dict[str, Tensor]:
        """Split an output into the stored tensors of its form: the inverse of reading."""
        if isinstance(form, str):
            return {form: tensor}
        if "from" in form:
            return {form["from"]: tensor}
        parts: list[Json] = form["join"]
        if form["dim"] == -1:
            widths = [sum(self._width(output, name) for name in form_names(part)) for part in parts]
            pieces = tensor[..., : sum(widths)].split(widths, dim=-1)  # without the zeros of `widen`
        else:
            last = self._setup.max_tokens  # SD3: the rows of CLIP, then `max_tokens` rows of T5
            pieces = tensor.split([tensor.shape[form["dim"]] - last, last], dim=form["dim"])
        return {name: found for part, piece in zip(parts, pieces, strict=True) for name, found in self._apart(output, part, piece).items()}

    def _width(self, output: str, stored: str) -> int:
        component = self._setup.components[stored.rpartition(".")[2]]
        is_pooled = output.startswith("pooled")
        return pooled_width(component.config, component.class_name) if is_pooled else text_width(component.config)


def _masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the rows that a mask keeps; without a copy if they follow each other."""
    rows = mask.nonzero().reshape(-1)
    if not len(rows):
        return tensor[:0]
    first, last = int(rows[0]), int(rows[-1])
    return tensor[first : last + 1] if last - first + 1 == len(rows) else tensor[mask]


def load_part(component: Component, setup: TextSetup, device: torch.device) -> Foreign:
    """Load a module, a tokenizer or a processor of a text encoder."""
    if "ImageProcessor" in component.class_name:
        return load_image_processor(component)
    if not component.name.startswith(("tokenizer", "processor")):
        return load_module(component, setup.dtype, device)
    has_both = component.name.startswith("processor") and setup.family.pictures is not None
    return load_processor(component) if has_both else load_tokenizer(component)


def _may_be_flat(family: TextFamily) -> set[str]:
    """Return the tensors that may be all zeros or ones: masks, and further embeddings, such as those of quoted text if there is none."""
    main = ("prompt_embeds", "pooled_prompt_embeds", *family.rows)
    forms = [form for name, form in family.outputs.items() if name.partition(".")[0] not in main]
    return {name for form in forms for name in form_names(form)}


def _pipeline_call(pipeline: Foreign, setup: TextSetup, device: torch.device) -> Call:
    args = call_arguments(pipeline, setup.args)

    def call(payloads: Sequence[Caption | Padded | WithPictures]) -> dict[str, Any]:
        captions = [payload if isinstance(payload, Caption) else payload.caption for payload in payloads]
        lengths = [payload.length for payload in payloads if isinstance(payload, Padded)]
        given: dict[str, Any] = {**args, MAX_LENGTH_ARG: max(lengths)} if lengths else {**args}
        if any(isinstance(caption, OwnCaptions) for caption in captions):  # what the text encoders after the first read
            for index, name in list(enumerate(setup.family.encoders))[1:]:
                given[name.replace("text_encoder", "prompt")] = [caption_at(caption, index) for caption in captions]
        for shown in [payload for payload in payloads if isinstance(payload, WithPictures)]:
            given |= picture_arguments(setup.family, shown)
        arguments = prompt_arguments(pipeline.encode_prompt, given, len(captions), device)
        with nullcontext() if args.get(SKIP_ARG) is None else clip_as_it_was(pipeline):
            # a new list, as Z-Image writes its chat template into it; a second call would apply it twice
            named = _named(setup.family, pipeline.encode_prompt(prompt=[caption_at(one, 0) for one in captions], **arguments))
        return _projected(pipeline.connectors, named) if CONNECTORS in setup.family.components else named

    return call


def _projected(connectors: Foreign, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what LTX-2's connectors give to their transformers, which are trained: the layers of each token, normalised and projected."""
    names = ("video_connector", "audio_connector")
    own = {name: getattr(connectors, name) for name in names}
    try:
        for name in names:
            setattr(connectors, name, _Unchanged())
        video, audio, _ = connectors(named["prompt_embeds"], named["prompt_attention_mask"])
    finally:
        for name, module in own.items():
            setattr(connectors, name, module)
    return {**named, "prompt_embeds": video, "audio_prompt_embeds": audio}


class _Unchanged(torch.nn.Module):
    """Stands for a transformer of LTX-2's connectors. It returns what it gets."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return hidden_states, attention_mask


def picture_arguments(family: TextFamily, payload: WithPictures) -> dict[str, Any]:
    """Return the pictures of a caption as an argument of `encode_prompt`."""
    assert family.pictures is not None
    return {"image": payload.pictures[0] if family.pictures.most == 1 else list(payload.pictures)}


def call_arguments(pipeline: Foreign, args: Mapping[str, Json]) -> dict[str, Json]:
    """Return a recipe's arguments of `encode_prompt`, with digests replaced by the defaults. Raises BadInput if these have changed."""
    given = {**args}
    for name, value in args.items():
        if isinstance(value, Mapping) and set(value) == {DEFAULT_OF_CALL}:
            given[name] = inspect.signature(pipeline.__call__).parameters[name].default
            if digest_bytes(canonical(given[name])) != value[DEFAULT_OF_CALL]:
                raise BadInput(
                    f"the installed diffusers has a new default of {name} for {type(pipeline).__name__}, which gives other embeddings;"
                    f" install the earlier diffusers, or choose the value of {name} with {option('encode_arg')}",
                    option="encode_arg",
                )
    return given


def prompt_arguments(encode_prompt: Callable[..., Any], args: Mapping[str, Json], count: int, device: torch.device) -> dict[str, Any]:
    """Return all arguments of `encode_prompt` but the captions; None for required ones without a value.

    Raises BadInput for unknown `args`.
    """
    given = {
        "device": device,
        "num_images_per_prompt": 1,
        "num_videos_per_prompt": 1,
        "do_classifier_free_guidance": False,
        "batch_size": count,
        **args,
    }
    parameters = [one for one in inspect.signature(encode_prompt).parameters.values() if one.name != "prompt"]
    names = {parameter.name for parameter in parameters}
    unknown = sorted(set(args) - names)
    if unknown:
        raise BadInput(f"encode_prompt of the installed diffusers takes no {', '.join(unknown)}; it takes {', '.join(sorted(names))}")
    return {
        parameter.name: given.get(parameter.name)
        for parameter in parameters
        if parameter.name in given or parameter.default is parameter.empty
    }


def _named(family: TextFamily, returned: Foreign) -> dict[str, Any]:
    returned = (returned,) if isinstance(returned, Tensor) or (isinstance(returned, list) and len(family.returns) == 1) else returned
    if not isinstance(returned, tuple | list) or len(returned) != len(family.returns):
        raise BadInput(
            f"encode_prompt of {family.pipeline} should return {len(family.returns)} values, but does not in the"
            " installed diffusers; with diffusers 0.42.1 it does"
        )
    named = {name: value for name, value in zip(family.returns, returned, strict=True) if name is not None}
    return {name: value.movedim(family.batch_axes.get(name, 0), 0) if name in family.batch_axes else value for name, value in named.items()}


def _parts_call(parts: Mapping[str, Foreign], setup: TextSetup, device: torch.device) -> Call:
    skip = setup.args.get(SKIP_ARG) or 0

    def call(captions: Sequence[Caption]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for index, name in enumerate(setup.family.called):
            part, tokenizer = setup.family.parts[name], parts[name.replace("text_encoder", "tokenizer")]
            length = setup.max_tokens if MAX_LENGTH_ARG in part.args else tokenizer.model_max_length
            texts = [caption_at(one, index) for one in captions]
            ids = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
            states = parts[name](ids.to(device), output_hidden_states=part.layer is not None)
            if part.rows is not None:
                made[part.rows] = states.last_hidden_state if part.layer is None else states.hidden_states[part.layer - skip]
            if part.pooled is not None:
                made[part.pooled] = states.text_embeds if "text_embeds" in states else states.pooler_output
        return made

    return call


def _model_call(parts: Mapping[str, Foreign], limit: int, device: torch.device) -> Call:
    """Return a call that gives a model's last hidden states, padded to the group's length, so that they do not depend on the batch."""
    whole = parts["text_encoder"]
    model = whole.get_encoder() if getattr(whole.config, "is_encoder_decoder", False) else whole
    padding = parts["tokenizer"].pad_token_id or 0

    def call(payloads: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        length = padded_length(max(len(ids) for ids in payloads), limit)
        ids = torch.tensor([[*payload, *([padding] * (length - len(payload)))] for payload in payloads], device=device)
        real = torch.tensor([[1] * len(payload) + [0] * (length - len(payload)) for payload in payloads], device=device)
        states = model(input_ids=ids, attention_mask=real).last_hidden_state
        return {"prompt_embeds": states, "prompt_attention_mask": real}

    return call
