"""How a source is read into samples: the options of a request that decide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

CaptionLines = Literal["whole", "each", "first"]


@dataclass(frozen=True, slots=True)
class Reading:
    """The options that decide which samples a source has, and which captions."""

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


PLAIN: Final = Reading()
"""As without any option."""
