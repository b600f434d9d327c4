"""How a source is read into samples: the options of a request that decide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cachestore.core.arguments import refuse_caption

CaptionLines = Literal["whole", "each", "first"]
TarNames = Literal["first-dot", "last-dot"]


@dataclass(frozen=True, slots=True)
class ListingOptions:
    """The options that decide which samples a source has, and which captions. Raises BadInput for a caption that no text encoder reads."""

    caption_lines: CaptionLines = "whole"
    """A caption file is "whole" one caption, or "each" of its lines is one, or only its "first" line."""
    caption: str | None = None
    """The caption of samples that have none; by default the empty one."""
    videos: bool = False
    """Whether videos are samples. Without it they are only counted."""
    roles: Sequence[str] = ()
    """The user's own roles, beside those of the table."""
    locations: Sequence[tuple[str, str]] = ()
    """(role, where): in a folder, files of this role are in a folder `masks/`, or their stems have an ending `-masklabel`."""
    caption_column: str | None = None
    """The column or field with the captions, instead of those that are known."""
    tar_names: TarNames = "first-dot"
    """Where the name of a tar's sample ends and its suffix begins: at the "first-dot" of the member's name, or at the "last-dot"."""

    def __post_init__(self) -> None:
        if self.caption is not None:
            refuse_caption(self.caption, "the caption of samples that have none")


PLAIN: Final = ListingOptions()
