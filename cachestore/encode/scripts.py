"""Say how text and latents differ from those of diffusers' own training scripts, as far as the table of families knows."""

import json
from collections.abc import Iterator

from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.models.folders import eight_bits
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.text.encoder import TextEncoder


def unlike_script(encoder: Encoder, *, is_for_scripts: bool = True) -> Iterator[str]:
    """Yield a line for each known difference from what the family's training script makes by default, and for weights that are rounded.

    Of who trains with another program than these scripts, only the latter concern.
    """
    if is_for_scripts and isinstance(encoder, LatentsEncoder) and encoder.setup.script_resizes not in (None, encoder.setup.resample):
        theirs, ours = encoder.setup.script_resizes, encoder.setup.resample
        yield (
            f"diffusers' training script of this family resizes pictures by {theirs} interpolation, cachestore by {ours.capitalize()}:"
            f" pass {option('resample', theirs)} to resize as the script does"
        )
    if not isinstance(encoder, TextEncoder | LatentsEncoder):
        return
    for component in encoder.setup.components.values():
        if eight_bits(component) == "plain":
            yield f"{component.name} has weights in 8 bits without scales: they are used at the values that they have, which are rounded"
    if not is_for_scripts or not isinstance(encoder, TextEncoder):
        return
    args = encoder.setup.args
    for name, value in encoder.setup.family.script_args.items():
        if name in args and args[name] != value:
            ours = "the default of its pipeline" if isinstance(args[name], dict) else json.dumps(args[name])
            yield (
                f"diffusers' training script of this family encodes text with {name}={json.dumps(value)}, cachestore with"
                f" {ours}: pass --encode-arg '{name}={json.dumps(value)}' to get the script's text"
            )
