"""sd-scripts over a data set that `precompute --buckets sd-scripts` made: its own readers find its npz files in the store."""
# pyright: basic, reportMissingImports=false

from typing import Any

from cachestore import live


def pictures_of(caller: Any) -> list[tuple[str, Any, Any]]:
    """Return the id, ImageInfo and subset of each picture. A ControlNet data set has them in another one."""
    real = [getattr(one, "dreambooth_dataset_delegate", one) for one in getattr(caller, "datasets", [caller])]
    found = [(info, one.image_to_subset[info.image_key]) for one in real for info in one.image_data.values()]
    if other := next((info for info, _subset in found if info.absolute_path.endswith(".npz")), None):
        raise live.Refused(f"{other.image_key}: its metadata has no image_size, and sd-scripts takes {other.absolute_path} for the picture")
    ids = live.ids_of(info.absolute_path for info, _subset in found)
    return [(name, info, subset) for name, (info, subset) in zip(ids, found, strict=True)]


def find_latents(caller: Any, strategy: Any) -> None:
    """Give each picture the path of its latents. Ends the run with exit code 2 where the data set has none, or others."""
    files: Any = live.current().exported
    for _name, info, subset in pictures_of(caller):
        path, bucket = strategy.get_latents_npz_path(info.absolute_path, info.image_size), tuple(info.bucket_reso)
        if not files.exists(path) or bucket not in files.buckets(path):
            files.refuse(path, f"sd-scripts wants latents of the bucket {bucket}")
        if not strategy.is_disk_cached_latents_expected(info.bucket_reso, path, subset.flip_aug, subset.alpha_mask):
            files.refuse(path, "sd-scripts does not take what is in it")
        info.latents_npz = path
        live.current().count("latents", reused=1)


def find_text(caller: Any, strategy: Any) -> None:
    """Give each picture the path of its text, as `find_latents` does."""
    files: Any = live.current().exported
    for _name, info, _subset in pictures_of(caller):
        path = strategy.get_outputs_npz_path(info.absolute_path)
        if not files.exists(path) or files.caption(path) != info.caption:
            files.refuse(path, f"sd-scripts wants the text of the caption {info.caption!r}")
        if not strategy.is_disk_cached_outputs_expected(path):
            files.refuse(path, "sd-scripts does not take what is in it")
        info.text_encoder_outputs_npz = path
        live.current().count("text", reused=1)
