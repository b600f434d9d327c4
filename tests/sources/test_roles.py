"""Images of a role beside the pictures they belong to: by the name of their folder, or the end of their own name."""

import tarfile
from io import BytesIO

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.spelling import option
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.sources.combined import list_path
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.sources.roles import split_roles
from tests.sources.sources import folder, unused


def reading(roles, *, videos=False):
    """As the command reads `--roles`."""
    own, locations = split_roles(PrecomputeRequest.from_json({"data": "d", "model": "m", "store": "s", "roles": roles}).roles)
    return ListingOptions(roles=own, locations=locations, videos=videos)


def images(path, roles="", *, videos=False):
    """The images of each sample, and whether the run would stop to ask."""
    listing = list_path(path, reading(roles, videos=videos))
    return {sample.id: dict(sample.images) for sample in listing.samples()}, listing.seen.asks


@pytest.mark.parametrize(
    ("roles", "mask", "picture"),
    [
        ("mask=masks/", "masks/a.png", "a.jpg"),
        ("mask=masks/", "MASKS/a.png", "a.jpg"),
        ("mask=masks/", "masks/sub/a.png", "sub/a.jpg"),
        ("mask=masks/", "masks/x/a.png", "images/x/a.jpg"),
        ("mask=masks/", "train/masks/a.webp", "train/images/a.jpg"),
        ("mask=masks/fine/", "masks/fine/a.png", "a.jpg"),
        ("mask=masks/,mask=_mask", "masks/a_mask.png", "a.jpg"),
        ("mask=masks/", "masks/a.mask.png", "a.jpg"),
        ("mask=-masklabel", "a-masklabel.png", "a.jpg"),
        ("mask=-masklabel", "sub/a-masklabel.png", "sub/a.jpg"),
        ("mask=.seg", "a.seg.png", "a.jpg"),
    ],
)
def test_a_mask_belongs_to_the_picture_of_its_name(tmp_path, roles, mask, picture):
    folder(tmp_path, {picture: "", mask: "", "other/b.jpg": ""})
    found, asks = images(tmp_path, roles)
    assert found == {picture: {"image": (picture,), "mask": (mask,)}, "other/b.jpg": {"image": ("other/b.jpg",)}}
    assert asks == []


def test_controls_own_roles_and_videos_have_locations_too(tmp_path):
    names = ("v.mp4", "masks/v.mp4", "a.png", "a-condlabel.png", "depth_maps/a.png")
    folder(tmp_path, dict.fromkeys(names, ""))
    found, asks = images(tmp_path, "control=-condlabel,depth=depth_maps/,mask=masks/", videos=True)
    assert found == {
        "a.png": {"image": ("a.png",), "control": ("a-condlabel.png",), "depth": ("depth_maps/a.png",)},
        "v.mp4": {"video": ("v.mp4",), "mask": ("masks/v.mp4",)},
    }
    assert asks == []


def test_a_mask_of_no_picture_or_of_several_is_no_sample_and_named(tmp_path):
    folder(tmp_path, dict.fromkeys(("masks/a.png", "masks/b.png", "x/a.jpg", "y/a.jpg", "c-masklabel.png"), ""))
    found, _asks = images(tmp_path, "mask=masks/,mask=-masklabel")
    assert found == {"x/a.jpg": {"image": ("x/a.jpg",)}, "y/a.jpg": {"image": ("y/a.jpg",)}}
    assert unused(tmp_path, locations=(("mask", "masks/"), ("mask", "-masklabel"))) == {
        "role-without-picture": ["c-masklabel.png", "masks/a.png", "masks/b.png"]
    }


@pytest.mark.parametrize(
    ("names", "as_role", "as_picture"),
    [
        (("a.png", "a-masklabel.png"), "mask=-masklabel", "image=-masklabel"),
        (("a.png", "a-condlabel.png"), "control=-condlabel", "image=-condlabel"),
        (("a.png", "a_mask.png"), "mask=_mask", "image=_mask"),
        (("a.png", "b.png", "masks/a.png", "masks/b.png"), "mask=masks/", "image=masks/"),
        (("x/a.png", "mask/x/a.png"), "mask=mask/", "image=mask/"),
        (("images/a.png", "Conditioning/a.png"), "control=Conditioning/", "image=Conditioning/"),
        (("images/x/a.png", "conditioning_images/x/a.png"), "control=conditioning_images/", "image=conditioning_images/"),
        (("a.png", "reference/a.png"), "reference=reference/", "image=reference/"),
        (("v.mp4", "control/v.mp4"), "control=control/", "image=control/"),
    ],
)
def test_names_that_may_be_of_masks_are_asked_about_with_the_option_for_either_meaning(tmp_path, names, as_role, as_picture):
    folder(tmp_path, dict.fromkeys(names, ""))
    _found, [words] = images(tmp_path, videos=True)
    assert f"pass {option('roles', as_role)};" in words
    assert words.endswith(f"pass {option('roles', as_picture)}")
    owned, asks = images(tmp_path, as_role, videos=True)
    pictures, none = images(tmp_path, as_picture, videos=True)
    assert (asks, none) == ([], [])
    assert len(pictures) == len(names)
    assert len(owned) < len(names)


def test_the_option_that_is_asked_for_keeps_what_was_given(tmp_path):
    folder(tmp_path, dict.fromkeys(("a.png", "a.depth.png", "masks/a.png", "a-condlabel.png"), ""))
    _found, [words] = images(tmp_path, "depth,control=-condlabel")
    assert "depth,control=-condlabel,mask=masks/" in words


@pytest.mark.parametrize(
    "names",
    [
        ("masks/a.png",),
        ("a.png", "masks/b.png"),
        ("a.png", "masks/a.png", "masks/other.png"),
        ("gas_mask.png", "a.png"),
        ("masks/a.png", "masks/b.png"),
    ],
)
def test_names_that_fit_no_picture_are_not_asked_about(tmp_path, names):
    folder(tmp_path, dict.fromkeys(names, ""))
    assert images(tmp_path)[1] == []


def test_folders_with_the_same_names_get_one_remark_and_stop_nothing(tmp_path):
    names = [f"{kind}/{n:04}.png" for kind in ("10_cat", "5_dog") for n in range(3)]
    folder(tmp_path, dict.fromkeys((*names, "5_dog/more.png", "alone/x.png"), ""))
    remarks = Remarks()
    assert len(list(list_path(tmp_path).samples(remarks))) == 8
    assert (remarks.asks, remarks.same_names) == ([], ["10_cat/ and 5_dog/"])
    [words] = [words for words in remarks.in_words() if "same names" in words]
    assert option("roles", "mask=masks/") in words


def test_an_entry_that_names_no_file_gets_a_remark(tmp_path):
    folder(tmp_path, dict.fromkeys(("a.png", "masken/a.png"), ""))
    remarks = Remarks()
    list(list_path(tmp_path, reading("mask=masks/,image=masken/,control=-cond")).samples(remarks))
    assert remarks.nowhere == ["mask=masks/", "control=-cond"]


def test_a_tar_has_the_same_locations(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in ("images/1.jpg", "images/1.txt", "masks/1.png", "images/2.jpg", "images/2-condlabel.png"):
            file.addfile(tarfile.TarInfo(name), BytesIO())
    found, _asks = images(tmp_path / "a.tar", "mask=masks/,control=-condlabel")
    assert found == {
        "images/1.jpg": {"image": ("images/1.jpg",), "mask": ("masks/1.png",)},
        "images/2.jpg": {"image": ("images/2.jpg",), "control": ("images/2-condlabel.png",)},
    }
    assert images(tmp_path / "a.tar")[1]


@pytest.mark.parametrize(
    "roles", ["mask=masks", "mask=", "video=x/", "Depth=x/", "caption=x/", "mask=/", "mask=../", "mask=a//b/", "mask=-", "mask"]
)
def test_a_location_that_is_none_is_refused(roles):
    with pytest.raises(BadInput):
        reading(roles)
