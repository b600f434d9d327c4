"""The paths in a catalog's requests: which are gone, and how new ones are put in."""

import json
import tarfile

from cachestore.jobs.plan.recorded_paths import gone_paths, is_there, source_paths, with_source_paths


def test_only_absolute_paths_are_paths(tmp_path):
    request = {"text": {"data": "(in memory)", "model": "hub/id"}, "latents": {"data": str(tmp_path), "sources": [{"data": "/b"}]}}
    assert source_paths(request) == [str(tmp_path), "/b"]
    assert source_paths({}) == source_paths({"text": {}}) == []


def test_a_path_is_gone_if_nothing_is_there_and_the_same_encoder_names_another(tmp_path):
    here, gone = str(tmp_path), str(tmp_path / "gone")
    assert gone_paths({"text": {"data": gone}}, {"text": {"data": here}}) == [gone]
    assert gone_paths({"text": {"data": gone, "model": f"{gone}/m"}}, {"text": {"data": gone, "model": here}}) == [f"{gone}/m"]
    assert gone_paths({"text": {"data": here}}, {"text": {"data": gone}}) == [], "it is still there"
    assert gone_paths({"text": {"data": gone}}, {"latents": {"data": here}}) == [], "of another encoder"
    assert gone_paths({"text": {"data": gone}}, {"text": {"data": gone}}) == [], "nothing better is known"
    assert gone_paths({"text": {"model": "hub/id"}}, {"text": {"model": here}}) == [], "a hub id is no path"


def test_a_range_of_tars_is_there_if_all_of_them_are(tmp_path):
    for number in (0, 1):
        tarfile.open(tmp_path / f"shard-{number}.tar", "w").close()
    assert is_there(str(tmp_path / "shard-{0..1}.tar"))
    assert not is_there(str(tmp_path / "shard-{0..2}.tar"))


def test_new_paths_replace_old_ones_and_change_nothing_else():
    request = {
        "text": {"data": "/a", "model": "/a", "captions": "all"},
        "latents": {"data": "", "sources": [{"data": "/a", "label": "a"}, {"data": "(in memory)"}]},
    }
    before = json.dumps(request)
    assert with_source_paths(request, {"/a": "/b"}) == {
        "text": {"data": "/b", "model": "/a", "captions": "all"},
        "latents": {"data": "", "sources": [{"data": "/b", "label": "a"}, {"data": "(in memory)"}]},
    }
    assert json.dumps(request) == before
