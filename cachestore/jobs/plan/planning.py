"""Makes the plan of a request, the same on every rank. Encodes nothing.

`plan_request` is the whole way: names, encoders, columns, the plan, and what it changes. `publish_if_new` then shows the plan to others.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.captions import CaptionPolicy, has_wildcards
from cachestore.core.errors import BadUsage, FormatError, Incomplete
from cachestore.core.inputs import READ_HERE
from cachestore.core.keys import Json, canonical, canonical_text, digest_parts
from cachestore.core.samples import CONTROL, IMAGE, MASK, VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.encode.batching.unit import Encoder
from cachestore.files.paths import Layout
from cachestore.jobs.plan.chosen import as_trainer, with_chosen
from cachestore.jobs.plan.comparison import Compare, compare
from cachestore.jobs.plan.encoders import check_latents, check_resamplers, encoders_of, make_encoders, needs_of_request, refuse_unmade
from cachestore.jobs.plan.options import LATENTS, PrecomputeRequest
from cachestore.jobs.plan.remarks import count_reread_files, not_made, references_of, remark_without_picture, remarks_on, remarks_on_paths
from cachestore.jobs.plan.wanted_columns import NAMED_ROLES, picture_role, wanted_columns
from cachestore.jobs.share.agreement import Intent, counted, wait_for_rank_0
from cachestore.jobs.share.plan import ColumnRequest, Plan, build_plan, is_published, plan_name, publish_plan, read_plan
from cachestore.jobs.share.workers import PLANNING, Heartbeat
from cachestore.sources.combined import IN_MEMORY, InMemory, files_of, files_of_sources, list_path, list_sources
from cachestore.sources.files import IMAGE_SUFFIXES, SourceFiles
from cachestore.sources.listing import Listing, with_alpha
from cachestore.sources.remarks import RefusedItem, Remarks
from cachestore.sources.unused import unused_in_words
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.made import check_no_session

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel
    from cachestore.encode.needs import Need


PLAN_SECONDS: Final = 5.0
"""How long a rank other than 0 waits for the plan if it sees no rank 0. Then it builds the plan itself."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request with its source, encoders and plan. No model is loaded."""

    layout: Layout
    request: PrecomputeRequest
    """What was asked for, with nothing left open."""
    files: SourceFiles
    """The files that the plan's references lead to."""
    encoders: tuple[Encoder, ...]
    plan: Plan
    intent: Intent
    """What other invocations see of it."""
    compare: Compare
    """Compares the plan with a catalog that it would replace, now and before it is published."""
    is_new: bool = False
    """Whether the plan was built here and cannot be read from the store."""
    remarks: tuple[str, ...] = ()
    """What a user should know before the run."""
    not_made_here: tuple[str, ...] = ()
    """Descriptions of inputs that the model is trained with but that are not made here."""
    model_files: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """With `recheck`: how many files of the model were read again, and how many had other bytes than the data set was made with."""
    unused: tuple[Mapping[str, Json], ...] = ()
    """What is not used of the source now: the rows of `Unused.as_json`."""
    how: tuple[str, ...] = ()
    """What is done as the trainer of `--buckets` does it, and how the values differ from those of diffusers' own training script."""

    def as_json(self) -> dict[str, Json] | None:
        """Return as JSON what another process needs to work on the published plan; None if the plan there cannot be read."""
        if self.is_new:
            return None
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        return {"plan": self.plan.name, "intent": asdict(self.intent), "model_files": dict(self.model_files), **lists}

    @classmethod
    def from_json(cls, layout: Layout, request: PrecomputeRequest, body: Mapping[str, Any], heartbeat: Heartbeat) -> "Planned":
        """Return what another process has planned, from the result of its `as_json`: nothing is listed or built again.

        `request` is the one that was planned. Raises Incomplete if the plan or the model is not as it was there.
        """
        plan, again = _read_plan(layout, body["plan"]), "run the same command again"
        if plan is None:
            raise Incomplete(f"the plan is gone since the work began; {again}")
        # Also with `recheck`, the digests of the model's files are those that the other process has just published.
        encoders = make_encoders(layout, replace(request, recheck=False), is_dry=False, rise=heartbeat.rise)[: len(plan.recipes)]
        if [one.recipe.fingerprint for one in encoders] != [one.fingerprint for one in plan.recipes]:
            raise Incomplete(f"the model's files have changed since the work began; {again}")
        files = files_of_request(request)
        lists: dict[str, Any] = {name: tuple(body[name]) for name in _LISTS}
        intent, comparing = Intent(**body["intent"]), partial(compare, replace_allowed=request.replace, asked=request.hints())
        _announce(layout, heartbeat, intent)
        return cls(layout, request, files, encoders, plan, intent, comparing, model_files=body["model_files"], **lists)


_LISTS: Final = ("remarks", "not_made_here", "unused", "how")


def list_request(request: PrecomputeRequest, in_memory: InMemory | None = None) -> Listing:
    """Check a request, and return the listing of its sources; `in_memory` are those in memory. Raises BadInput."""
    request.check()
    how = request.reading
    listing = list_sources(request.sources, in_memory or {}, how) if request.sources else list_path(request.data, how)
    return with_alpha(listing) if request.alpha == MASK else listing


def files_of_request(request: PrecomputeRequest) -> SourceFiles:
    """Return the files of a request's sources, with as little listed as possible. Raises BadInput."""
    return files_of_sources(request.sources) if request.sources else files_of(request.data)


def plan_request(
    layout: Layout,
    request: PrecomputeRequest,
    listing: Listing,
    *,
    loaded: "LoadedModel | None" = None,
    heartbeat: Heartbeat | None = None,
    compare_with: Compare | None = None,
    is_dry: bool = False,
) -> Planned:
    """Digest the model's files, and read the plan or build it. Publishes no plan; with `is_dry` nothing at all.

    A `loaded` model replaces the one that the request names. With a `heartbeat`, others see what this invocation is about to do, and a
    rank other than 0 waits for rank 0 to publish the plan. `compare_with` says what the plan may change in the newest catalog, whose names
    it keeps; without it only `--replace` allows another model.

    Raises BadInput for a source or model that cannot be used or a name that sessions use, BadUsage if the source has nothing to encode,
    RecipeMismatch if the name is used already for something else.
    """
    from cachestore.encode.scripts import unlike_script

    request = replace(request, name=unicodedata.normalize("NFC", request.name))  # as in the name of its folder
    check_no_session(layout, request.name)
    if compare_with is None:
        _check_names(request, listing)
    if heartbeat is not None:
        heartbeat.show(doing="reading the model's files")
    needs = needs_of_request(request, loaded)
    rise = (lambda: None) if heartbeat is None else heartbeat.rise
    encoders = make_encoders(layout, request, is_dry=is_dry, rise=rise) if loaded is None else encoders_of(request, {}, loaded)
    request, encoders = with_chosen(layout, request, encoders)
    check_latents(request, encoders)
    columns = wanted_columns(encoders, request)
    asked, intent = _intent_of(request, encoders, columns, listing)
    if heartbeat is not None:
        _announce(layout, heartbeat, intent)
    earlier = _read_plan(layout, intent.plan)
    plan = earlier
    if plan is None:
        plan = _build(request, listing, encoders, columns, asked=asked, intent=intent, needs=needs, heartbeat=heartbeat)
    encoders = encoders[: len(plan.recipes)]
    previous = newest_catalog(layout, request.name, io="mmap")
    unused = listing.unused(references_of(plan)).as_json()
    if not plan.unit_count and (plan.ids or previous is None):  # else all samples leave an existing data set: `compare` handles that
        raise BadUsage(
            _nothing_in_words(request, len(plan.ids), (*plan.remarks, *unused_in_words(listing.unused(()).as_json()))), option="data"
        )
    check_resamplers(plan, encoders)
    comparing = compare_with or partial(compare, replace_allowed=request.replace, asked=request.hints())
    changes = (*comparing(plan, previous), *remarks_on_paths(plan, previous, request))
    unmade = not_made(needs, plan)
    if request.strict and unmade:
        refuse_unmade(unmade)
    return Planned(
        layout,
        request,
        listing,
        encoders,
        plan,
        intent,
        comparing,
        is_new=earlier is None,
        remarks=(*plan.remarks, *filter(None, (plan.without_picture,)), *changes),
        not_made_here=unmade,
        model_files=count_reread_files(plan, previous) if request.recheck else {},
        unused=tuple(unused),
        how=(
            *as_trainer(request, encoders),
            *(words for one in encoders for words in unlike_script(one, is_for_scripts=request.buckets in READ_HERE)),
        ),
    )


def publish_if_new(planned: Planned) -> Planned:
    """Publish a plan that is not published yet. As it is read from disk, it takes less memory."""
    if not planned.is_new:
        return planned
    publish_plan(planned.layout, planned.plan)
    there = _read_plan(planned.layout, planned.plan.name)
    return planned if there is None else replace(planned, plan=there, is_new=False)


def _read_plan(layout: Layout, name: str) -> Plan | None:
    """The published plan; None if there is none or it is damaged: the one built here is the same."""
    try:
        return read_plan(layout, name) if is_published(layout, name) else None
    except FormatError:
        return None


def _announce(layout: Layout, heartbeat: Heartbeat, intent: Intent) -> None:
    """Show others what this invocation is about to do. A rank other than 0 waits for the plan of rank 0."""
    heartbeat.detail = intent.as_json()
    heartbeat.doing = PLANNING if heartbeat.rank in {0, None} else "waiting for the plan of rank 0"
    heartbeat.write()
    if heartbeat.rank not in {0, None}:
        wait_for_rank_0(layout, heartbeat, lambda: is_published(layout, intent.plan), unseen_seconds=PLAN_SECONDS)


def _check_names(request: PrecomputeRequest, listing: Listing) -> None:
    """Raise BadUsage for files that may be masks or pictures, and for captions of another spelling where most samples have none."""
    if listing.seen.asks:
        raise BadUsage("; ".join(listing.seen.asks), option="roles")
    if listing.seen.captions_elsewhere and _asks_for_text(request):
        raise BadUsage("; ".join(listing.seen.captions_elsewhere), option="caption")


def _intent_of(
    request: PrecomputeRequest, encoders: Sequence[Encoder], columns: Sequence[ColumnRequest], listing: Listing
) -> tuple[str, Intent]:
    """Return the digest of what is asked for, and what others of the launch see of it."""
    # Masks and further images follow from the rest, and only a whole pass over the source shows whether there are any.
    asked_for = [encoder for encoder in encoders if encoder.recipe.encoder != MASK]
    named = [column.column for column in columns if column.column.role in NAMED_ROLES and column.column.encoder != MASK]
    described = [[one.encoder, one.role, dict(one.options)] for one in named]
    encoding = request.policy.encoding()
    policy = canonical_text(encoding) if encoding not in ({}, {"choose": "all"}) else "all" if encoding else "first"
    arguments = digest_parts("cachestore-arguments", request.name, policy, canonical(described)).hex()
    prompts = [canonical([list(pair) for pair in request.prompts])] if request.prompts else []
    content = digest_parts(listing.content, policy, *prompts).hex()
    asked = digest_parts("cachestore-request", arguments, *(encoder.recipe.fingerprint for encoder in asked_for)).hex()
    fingerprints = {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in asked_for}
    return asked, Intent(arguments, fingerprints, content, plan_name(asked, content))


def _build(
    request: PrecomputeRequest,
    listing: Listing,
    encoders: Sequence[Encoder],
    columns: Sequence[ColumnRequest],
    *,
    asked: str,
    intent: Intent,
    needs: "Sequence[Need]",
    heartbeat: Heartbeat | None,
) -> Plan:
    """Build the plan from the samples. Raises BadInput if every sample fails alone, BadUsage for rows that lack what is asked for."""
    seen, texts = Remarks(), Remarks()
    samples = listing.samples(seen) if heartbeat is None else counted(listing.samples(seen), heartbeat)
    plan = build_plan(
        catalog=request.name,
        request=asked,
        content=intent.content,
        recipes=[encoder.recipe for encoder in encoders],
        samples=_of_asked_kinds(request, _with_texts(samples, request.policy, texts)),
        columns=columns,
        texts=request.policy.encoding(),
        # If a text encoder also sees the sample's images, the empty caption has another value for each sample.
        extra=[
            (n, {"caption": caption})
            for n, encoder in enumerate(encoders)
            if encoder.recipe.encoder == "text" and not picture_role(encoder)
            for caption in dict.fromkeys(["", *(text for pair in request.prompts for text in pair)])
        ],
        prompts=request.prompts,
        refuse=lambda sample, reason: seen.refused.append(RefusedItem(sample, reason)),
    )
    if not plan.ids:
        seen.refused.refuse_all(request.named_data)
    _refuse_rows(request, seen)
    remarks = (
        *seen.in_words(),
        *(texts.in_words() if _asks_for_text(request) else ()),
        *(() if plan.ids else (_nothing_in_words(request, 0, ()),)),
        *remarks_on(plan, needs),
    )
    refused = [(one.sample, one.reason) for one in seen.refused]
    without_picture = remark_without_picture(plan, seen.rows_without_picture)
    return replace(plan, refused=refused, refused_count=len(seen.refused), remarks=remarks, without_picture=without_picture)


def _of_asked_kinds(request: PrecomputeRequest, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples. Raises BadUsage for a video that should be encoded if the request has no `frames`."""
    without_videos = LATENTS in request.encode and not request.frames
    for sample in samples:
        if without_videos and sample.images.get(VIDEO):
            how = f"pass {option('frames')} with the number of frames to encode, such as 17,49,81"
            raise BadUsage(f"sample {sample.id!r} has a video: {how}", option="frames")
        yield sample


def _with_texts(samples: Iterable[Sample], policy: CaptionPolicy, seen: Remarks) -> Iterator[Sample]:
    """Yield the samples with the texts that the policy encodes instead of their captions."""
    for sample in samples:
        if not policy.wildcards:
            seen.wildcards += [sample.id] if any(map(has_wildcards, sample.captions)) else []
        elif policy.has_more(sample.captions):
            seen.combinations.append(sample.id)
        texts = policy.texts(sample.captions)
        yield sample if texts == sample.captions else replace(sample, captions=texts)


def check_listing(request: PrecomputeRequest, listing: Listing) -> None:
    """Raise BadUsage if this request would encode nothing from its source. Reads only as many samples as that takes.

    Only for a data set that does not exist yet: all samples may leave an existing one.
    """
    _check_names(request, listing)
    count, seen, is_wanted, has_pictures = 0, Remarks(), False, False
    needs_text, needs_pictures = _asks_for_text(request), LATENTS in request.encode
    for sample in _of_asked_kinds(request, listing.samples(seen)):
        count += 1
        is_wanted |= needs_text or bool({IMAGE, CONTROL, VIDEO} & sample.images.keys())
        has_pictures |= not sample.images.keys().isdisjoint((IMAGE, VIDEO))
        may_lack = (needs_text and seen.missing) or (needs_pictures and seen.columns and not has_pictures)
        if is_wanted and not may_lack:
            return
    _refuse_rows(request, seen)
    if not is_wanted:
        raise BadUsage(_nothing_in_words(request, count, (*seen.in_words(), *unused_in_words(listing.unused(()).as_json()))), option="data")


def _asks_for_text(request: PrecomputeRequest) -> bool:
    return any(name != LATENTS for name in request.encode)


def _refuse_rows(request: PrecomputeRequest, seen: Remarks) -> None:
    """Raise BadUsage for sources of which no row has a caption, or none a picture, if these are to be encoded."""
    if seen.uncaptioned and _asks_for_text(request):
        raise BadUsage("; ".join(seen.uncaptioned), option="caption")
    if seen.pictureless and LATENTS in request.encode:
        instead = f"rename the column, or pass {option('encode', 'text')} for captions alone"
        raise BadUsage("; ".join([*seen.pictureless, instead, *seen.misspelt]), option="encode")


def _nothing_in_words(request: PrecomputeRequest, samples: int, remarks: Sequence[str]) -> str:
    """Why a source with this many samples has nothing to encode. Most likely the user meant another source."""
    paths = [source.data for source in request.sources] or [request.data]
    names = ", ".join("memory" if path == IN_MEMORY else path for path in paths)
    nothing = f"there is nothing to encode in {names}"
    if samples:
        asked = f"{option('encode')} asks for {', '.join(request.encode)} alone"
        return f"{nothing}: none of {plural(samples, 'sample')} has a picture, and {asked}"
    nothing += f": no picture ({', '.join(sorted(IMAGE_SUFFIXES))}), no row, no prompt"
    return "; ".join(dict.fromkeys((nothing, *remarks)))  # a plan's remarks may have the sentence already
