"""The ways to resize: their names in keys, and what each needs."""

import importlib.util

import pytest

from cachestore.core.errors import BadInput, MissingExtra
from cachestore.encode.families import resamplers
from cachestore.encode.families.resamplers import RESAMPLERS, check_resampler
from tests.fakes import asks_for


def test_the_names_in_keys_stay_as_they_are():
    assert {row.name: (row.pictures, row.videos) for row in RESAMPLERS.values()} == {
        "lanczos": ("torch-lanczos-cover-center/1", "pyav-swscale-601-torch-lanczos/1"),
        "area": ("opencv-area-cover-center/1", "pyav-swscale-601-opencv-area/1"),
        "bicubic": ("torch-bicubic-cover-center/1", "pyav-swscale-601-torch-bicubic/1"),
        "bilinear": ("torch-bilinear-cover-center/1", "pyav-swscale-601-torch-bilinear/1"),
        "cv2-linear": ("opencv-linear-cover-center/1", "pyav-swscale-601-opencv-linear/1"),
        "pillow": ("pillow-lanczos-cover-center/1", "pyav-swscale-601-pillow-lanczos/1"),
    }


@pytest.mark.parametrize("found", ["2.11.0", "2.9.1+cu128", "1.13.1", "2.6"])
def test_a_torch_without_lanczos_is_refused_with_both_versions(found, monkeypatch):
    monkeypatch.setattr(resamplers, "version", lambda _name: found)
    with pytest.raises(BadInput) as refused:
        check_resampler("lanczos")
    assert refused.value.option == "resample"
    assert found in str(refused.value)
    for name in ("bicubic", "bilinear", "pillow"):
        check_resampler(name)


@pytest.mark.parametrize("found", ["2.12.0", "2.13.0+cpu", "2.13.0a0+git1234", "3.0", "10.1.2"])
def test_a_torch_with_lanczos_is_taken(found, monkeypatch):
    monkeypatch.setattr(resamplers, "version", lambda _name: found)
    check_resampler("lanczos")


@pytest.mark.parametrize("name", ["area", "cv2-linear"])
def test_a_way_of_opencv_names_the_extra_if_it_is_not_installed(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, check=asks_for("resample", "[area]")):
        check_resampler(name)


@pytest.mark.torch
def test_the_torch_that_is_checked_here_resizes_by_lanczos():
    import torch

    check_resampler("lanczos")
    made = torch.nn.functional.interpolate(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), (2, 2), mode="lanczos", antialias=True)
    assert made.dtype == torch.uint8
