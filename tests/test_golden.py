"""Stores that were made when a format was new: every later version reads them, and says what it would break if it did not.

`tests/golden/format-<n>.zip` holds one for each number; `tests/golden/make.py` made it. After a release it is never made again.
"""

import json
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.collect import collect
from cachestore.care.losses import LOST_VERSION, read_lost
from cachestore.care.repair import repair
from cachestore.core.keys import Key
from cachestore.files import marker
from cachestore.files.paths import Layout, PassFolder
from cachestore.jobs.share import attempts, claims, ledgers, passes, plan, workers
from cachestore.jobs.share.passes import PassRef, read_done, read_round
from cachestore.jobs.share.plan import read_plan
from cachestore.store.format import catalog, index, marked, segment
from cachestore.store.format.catalog import read_catalog
from cachestore.store.format.marked import list_marked
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write import catalog_writer, commit, model_digests
from tests.golden.make import PROMPTS, make

GOLDEN = Path(__file__).parent / "golden"
KEPT = sorted(GOLDEN.glob("format-*.zip"))
PLAN = "f76d1facceb56df7d7495b4f0644496c"
OWN = cs.key("golden")
PAIRS = {
    "a.png": ["23d17c53c16f7309ccbba0442267fad4", "bc70a53964b9a87250e22f9bdba3baf2"],
    "b.png": ["47186aae2e4b98a098573e093c3ac650", "9d9971d93a8f7645809fa4514f00d2b8"],
}
WHOLE = {"format-1": (9, 4, 3, 7)}
"""Entries, segments, the number of the index, and units of the pass."""
VERSIONS = {
    "catalog": catalog.VERSION,
    "segment": segment.VERSION,
    "index": index.VERSION,
    "store": marker.VERSION,
    "recipe": commit.RECIPE_VERSION,
    "marked": marked.VERSION,
    "lost": LOST_VERSION,
    "digests": model_digests.VERSION,
    "dropped": catalog_writer.DROPPED_VERSION,
    "plan": plan.VERSION,
    "pass": passes.VERSION,
    "claim": claims.VERSION,
    "ledger": ledgers.VERSION,
    "attempt": attempts.VERSION,
    "worker": workers.VERSION,
}


@pytest.fixture(params=KEPT, ids=lambda path: path.stem)
def golden(request):
    return request.param


@pytest.fixture
def layout(golden, tmp_path):
    """A store of an earlier version, as it was."""
    with zipfile.ZipFile(golden) as file:
        file.extractall(tmp_path / "store")
    return Layout(tmp_path / "store")


@pytest.mark.parametrize("kind", VERSIONS)
def test_every_format_number_has_a_golden_store(kind):
    """A format with a new number needs a store that was made with it, beside those of the old ones."""
    numbers = {int(path.stem.removeprefix("format-")) for path in KEPT}
    assert set(range(1, VERSIONS[kind] + 1)) <= numbers


def test_a_golden_store_is_small():
    assert all(path.stat().st_size < 20_000 for path in KEPT)


def test_a_golden_store_is_whole(golden, layout):
    report = cs.verify(layout.root)
    assert (report.findings, report.entries, report.segments) == ((), *WHOLE[golden.stem][:2])


def test_a_golden_store_needs_no_repair(layout):
    assert repair(layout.root).quarantined == ()


def test_golden_values_are_what_they_were(layout):
    with Reader(layout.root, verify="always") as reader:
        found = reader.get(OWN, as_numpy=True)
        assert {name: array.tolist() for name, array in found.items()} == {"wide": [0, 1, 2, 3], "flag": [True, False]}
        assert dict(reader.describe(OWN).meta) == {"note": "ünïcöde"}
        for key in (key for keys in PAIRS.values() for key in keys):
            assert reader.get(key, as_numpy=True)["value"].tobytes() == bytes.fromhex(key)
            assert "input_digest" in reader.describe(key).meta


def test_a_golden_index_is_used(golden, layout):
    entries, _segments, index, _units = WHOLE[golden.stem]
    with closing(load_snapshot(layout)) as found:
        assert (found.generation, found.uncovered, len(found)) == (index, {}, entries)
    assert len(list_indexes(layout)) == 1


def test_a_golden_catalog_pairs_what_it_did(layout):
    found = read_catalog(layout.catalog("train", 2), generation=2)
    keys = {sample: [str(key) for column in found.columns for key in column.row_keys(row)] for row, sample in enumerate(found.ids)}
    assert {sample: sorted(listed) for sample, listed in keys.items()} == PAIRS
    assert found.digest == "2313e467548888f6d319c802398392cc"
    assert found.prompts == PROMPTS
    latents = next(column for column in found.columns if column.encoder == "latents")
    assert latents.cell(0).facts["bucket"] == (4, 4)


def test_a_golden_pass_says_what_became_of_it(golden, layout):
    units = WHOLE[golden.stem][3]
    ref, read = PassRef(PLAN, 1), read_plan(layout, PLAN)
    done = read_done(layout, ref)
    assert done is not None
    assert (done.report["encoded"], done.report["generation"], done.launches) == (units, 2, ("golden 1",))
    assert read_round(layout, ref, read, 0).unit_count == read.unit_count == units
    rows = [outcome for ledger in ledgers.read_ledgers(PassFolder(layout.pass_folder(PLAN, 1)), 0) for outcome in ledger.outcomes]
    assert len(rows) == units
    assert {str(outcome.key) for outcome in rows} >= {key for keys in PAIRS.values() for key in keys}
    assert read.unit(0).request


def test_a_golden_list_of_what_goes_is_obeyed(layout):
    [listed] = list_marked(layout)
    assert listed.segments <= list_segments(layout)
    assert collect(layout.root, apply=True, grace_seconds=0).removed.segments == 1
    assert not listed.segments & list_segments(layout)


def test_a_golden_list_of_what_was_lost_is_read(layout):
    [path] = layout.quarantine.glob("*.lost.json")
    assert read_lost(path) == {OWN: None}


def test_a_golden_catalog_that_is_gone_is_built_again(layout):
    from cachestore.care.repair import repair

    path = layout.catalog("train", 2)
    before = path.read_bytes()
    path.unlink()
    assert repair(layout.root).rebuilt == ("train",)
    assert path.read_bytes() == before


def test_the_same_work_still_makes_the_same_keys(tmp_path):
    """Keys, fingerprints and the names of plans are in stores for ever: others would mean that everything is encoded again."""
    make(tmp_path / "store")
    new = Layout(tmp_path / "store")
    with Reader(new.root) as reader:
        assert {Key.parse(key) for keys in PAIRS.values() for key in keys} | {OWN} <= set(reader.keys())
    assert [path.name for path in new.plans.iterdir()] == [PLAN]


def test_a_store_of_a_newer_format_is_refused_and_left_as_it_is(layout, capsys):
    from cachestore.cli import main
    from cachestore.core.errors import NewerFormat
    from cachestore.files.records import encode_record

    layout.marker.chmod(0o644)
    layout.marker.write_bytes(encode_record("cachestore-store", 99, {"mode": "private", "store_id": "0"}))
    before = {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}
    for command in (["verify"], ["repair"], ["gc", "--apply"], ["compact"], ["stats"], ["ls"], ["status"], ["doctor"]):
        assert main([command[0], str(layout.root), *command[1:], "--json"]) == 1
        assert "install a newer one" in json.loads(capsys.readouterr().out)["error"]
    for action in (cs.open, lambda root: cs.open(root, mode="a")):
        with pytest.raises(NewerFormat):
            action(layout.root)
    assert {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()} == before
