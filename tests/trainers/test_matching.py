"""Whose file it is: a law over names that differ in little, for each trainer that names files by their pictures."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachestore.core.samples import Sample
from cachestore.trainers.families import family_named
from cachestore.trainers.matching import CacheListing, Matches, references_of
from cachestore.trainers.table import imported_format
from tests.fakes import examples
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_paths
from tests.trainers.musubi.files import musubi_paths
from tests.trainers.sd_scripts.files import sd_latents_path
from tests.trainers.simpletuner.files import st_latents_path, st_text_path

pytestmark = pytest.mark.torch  # the trainers' caches are written with it

FOLDERS = ("", "a/", "A/", "vae/", "vae/vae/", "_latent_cache/")
NAMES = ("x", "X", "x.v2", "x ", "x.", "é", "e\u0301", "x_0064x0064_sdxl", "x_te_outputs", "x_0064x0064_fk", "x_" + "a" * 22)
SUFFIXES = (".png", ".jpg", ".PNG")
references = st.builds("".join, st.tuples(st.sampled_from(FOLDERS), st.sampled_from(NAMES), st.sampled_from(SUFFIXES)))


def paths_of(kind, picture, *, is_older):
    """The files that a trainer writes, or wrote, of a picture and its caption, relative to the cache: (latents, text)."""
    root = Path("/cache")
    match kind:
        case "sd-scripts" if is_older:
            found = root / f"{picture.stem}.npz", root / f"{picture.stem}_te_outputs.npz"
        case "simpletuner" if is_older:
            found = root / "vae" / f"{picture.stem}.pt", st_text_path(root / "text", picture.caption, "sdxl")
        case "sd-scripts":
            found = sd_latents_path(root, picture, "sdxl"), root / f"{picture.stem}_te_outputs.npz"
        case "simpletuner":
            found = st_latents_path(root / "vae", picture), st_text_path(root / "text", picture.caption, "sdxl")
        case "musubi":
            found = musubi_paths(root, picture, "flux")
        case _:
            found = aitk_paths(root, picture, "sdxl")
    return tuple(path.relative_to(root).as_posix() for path in found)


@pytest.mark.parametrize("kind", ["sd-scripts", "simpletuner", "musubi", "ai-toolkit"])
@examples(200)
@example([("x.png", "", ""), ("x_0064x0064_sdxl.png", "", ""), ("x_0064x0064_sdxl.jpg", "older", "")])
@given(
    st.lists(
        st.tuples(references, st.sampled_from(["", "older", "newer"]), st.sampled_from(["one", "other", ""])),
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_a_file_of_a_picture_of_the_source_is_of_that_one_or_of_nobody(kind, rows):
    """Some pictures were cached, under older or newer names, some not; a file that two of them have was written by either."""
    pictures = [trainers.Picture(reference, caption, (64, 64), (8, 8)) for reference, _name, caption in rows]
    latents: dict[str, set[str]] = {}
    texts: dict[str, set[str]] = {}
    for picture, (_reference, name, _caption) in zip(pictures, rows, strict=True):
        if name:
            of_latents, of_text = paths_of(kind, picture, is_older=name == "older")
            latents.setdefault(of_latents, set()).add(picture.reference)
            texts.setdefault(of_text, set()).add(picture.caption)
    samples = [Sample(picture.reference, {"image": (picture.reference,)}, (picture.caption,)) for picture in pictures]
    matches = Matches(family_named("flux" if kind == "musubi" else "sdxl"))
    imported_format(kind).reading.match(CacheListing(sorted({*latents, *texts})), samples, matches)
    for reference, locations in matches.latents.items():
        assert [latents.get(location.path) for location in locations] == [{reference}]
    for caption, locations in matches.text.items():
        assert all(texts.get(location.path) == {caption} for location in locations)


folders = st.lists(st.sampled_from("abc"), max_size=3).map(lambda parts: "".join(f"{part}/" for part in parts))


@given(folders, st.sets(st.builds("".join, st.tuples(folders, st.sampled_from(["1.png", "2.png"])))), st.data())
def test_paths_of_a_source_that_lay_elsewhere_are_of_their_own_pictures_or_of_none(root, pictures, data):
    """Of any part of them, wherever they lay; alone a path may be of any picture that it ends with, and is then of none."""
    some = data.draw(st.sets(st.sampled_from(sorted(pictures)))) if pictures else set()
    paths = [f"/{root}{picture}" for picture in some]
    found = references_of(paths, pictures)
    assert all(path == f"/{root}{picture}" for path, picture in found.known.items())
    assert all(path.removeprefix(f"/{root}") in those for path, those in found.doubtful.items())
    assert found.known.keys() | found.doubtful.keys() <= set(paths)


def test_a_path_that_ends_with_two_pictures_alike_may_be_either():
    found = references_of(["/old/512/0.png"], ["0.png", "512/0.png"])
    assert found == ({}, {"/old/512/0.png": ["512/0.png", "0.png"]})
    assert (found.open_to(), found.may_be()) == (["512/0.png", "0.png"], "512/0.png or 0.png")


def test_of_no_paths_nothing_is_found():
    assert references_of([], ["1.png"]) == references_of(["/x/2.png"], ["1.png"]) == ({}, {})


def test_a_windows_path_is_one_too():
    assert references_of(["C:\\data\\a\\1.png", "C:\\data\\2.png"], ["a/1.png", "2.png"]).known == {
        "C:\\data\\a\\1.png": "a/1.png",
        "C:\\data\\2.png": "2.png",
    }
