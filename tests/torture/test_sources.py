"""A sample of the broken sources, and what the campaign would see of a listing that swallows."""

from pathlib import Path

import pytest

from cachestore.sources.remarks import Refusals
from cachestore.store.write.commit import create_store
from tests.torture import sources


@pytest.mark.parametrize("kind", sources.KINDS)
def test_sources_of_each_kind_keep_what_nobody_touched_and_account_for_the_rest(kind, monkeypatch):
    monkeypatch.setattr(sources, "make", lambda number, seed, folder: _one(kind, number, seed, folder))
    assert sources.judge(7, None, range(15)) == []


def _one(kind, number, seed, folder):
    draw = sources.random.Random(f"{kind} {seed} {number}")
    if number % 4 == 0 and kind in sources.OF_FILES:
        return kind, sources.broken_whole(kind, folder, draw)
    return kind, sources.KINDS[kind](folder, draw)


def test_a_row_that_is_swallowed_and_a_traceback_would_be_seen(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "caption": "a"}\n{"image": 7}\n')
    layout = create_store(tmp_path / "store")
    source = sources.Source(tmp_path / "rows.jsonl", {"a.png": ("a",)}, 2)
    assert list(sources._violations(source, layout)) == []
    source.expected["b.png"] = ("b",)
    assert "'b.png', which nobody touched" in "".join(sources._violations(source, layout))
    del source.expected["b.png"]
    monkeypatch.setattr(Refusals, "append", lambda _self, _one: None)
    assert "of 2 parts only 1 are listed" in "".join(sources._violations(source, layout))
    monkeypatch.setattr(sources, "list_path", lambda *_given: {}["nothing"])
    assert any("KeyError" in one for one in sources.judge(1, None, range(20)))


def test_a_good_source_that_is_refused_would_be_seen(monkeypatch):
    monkeypatch.setattr(sources, "list_path", lambda path, _how: _refuse(Path(path)))
    assert any("one bad part ended all" in one for one in sources.judge(1, None, range(20)))


def _refuse(path):
    raise sources.CacheStoreError(f"{path} is refused")
