"""Columns `caption.ENCODER` of a source: which units they make, which changes encode again, and which columns are refused."""

import csv
import io
import json
import re
import tarfile

import pytest

import cachestore as cs
from cachestore.cli import main
from cachestore.core.errors import BadInput
from cachestore.core.inputs import combined_digest
from cachestore.core.keys import digest_text
from cachestore.jobs.plan.columns import cells_of
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.forecast import forecast_of
from cachestore.jobs.start.here import precompute_here
from tests import fakes
from tests.fakes import catalog

SECOND = "caption.text_encoder_2"
ROWS = [
    {"id": "plain.png", "caption": "a"},
    {"id": "own.png", "caption": "a", SECOND: "b"},
    {"id": "same.png", "caption": "a", SECOND: "a"},
    {"id": "first.png", "caption": "a", "caption.text_encoder": "c"},
]


@pytest.fixture
def two_encoders(makers):
    makers.options["captioned"] = ("text_encoder", "text_encoder_2")
    return makers


def manifest(folder, rows=ROWS):
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(folder):
    folder.mkdir()
    for row in ROWS:
        (folder / row["id"]).write_bytes(b"picture")
    text = io.StringIO()
    writer = csv.DictWriter(text, ["id", "file_name", "caption", SECOND, "caption.text_encoder"], restval="")
    writer.writeheader()
    writer.writerows({**row, "file_name": row["id"]} for row in ROWS)
    (folder / "metadata.csv").write_text(text.getvalue())
    return folder


def tar(folder):
    folder.mkdir()
    with tarfile.open(folder / "rows.tar", "w") as packed:
        for row in ROWS:
            for suffix, content in (("png", b"picture"), ("json", json.dumps(row).encode())):
                info = tarfile.TarInfo(row["id"].replace("png", suffix))
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
    return folder / "rows.tar"


def samples(_folder):
    own = [{name: text for name, text in row.items() if name.startswith("caption.")} for row in ROWS]
    return [cs.Sample(row["id"], captions=(row["caption"],), extras=extras) for row, extras in zip(ROWS, own, strict=True)]


def hugging_face(_folder):
    names = ("id", "caption", SECOND, "caption.text_encoder")
    return pytest.importorskip("datasets").Dataset.from_dict({name: [row.get(name) for row in ROWS] for name in names})


def run(data, root, **options):
    return precompute_here(PrecomputeRequest(str(data), "model", str(root), encode=("text",), **options))


def inputs(root):
    """The digest that each sample's text was made from; None for an empty cell."""
    found = catalog(root)
    [column] = found.columns
    return {found.ids[row]: cell.input.hex() if cell.key else None for row in range(len(found)) for cell in column.row_cells(row)}


@pytest.mark.parametrize("source", [manifest, table, tar, samples, pytest.param(hugging_face, marks=pytest.mark.torch)])
def test_every_source_makes_the_same_of_the_columns(two_encoders, tmp_path, root, source):
    expected = tmp_path / "expected"
    run(manifest(tmp_path / "rows"), expected)
    report = cs.precompute(source(tmp_path / "source"), model="model", store=root, encode=("text",), inline=True)
    assert (report.complete, report.encoded) == (True, 4), "a; a with b; c with a; the empty caption"
    assert inputs(root) == inputs(expected)
    found = inputs(root)
    assert found["plain.png"] == found["same.png"] == digest_text("a")
    assert len(set(found.values())) == 3
    assert cells_of(catalog(root).columns[0]).keys.any(axis=1).all()


def test_a_changed_column_encodes_its_sample_alone_again_and_an_equal_run_nothing(two_encoders, tmp_path, root):
    run(manifest(tmp_path / "rows"), root)
    changed = [{**row, SECOND: "d"} if row["id"] == "own.png" else row for row in ROWS]
    before = inputs(root)
    path = manifest(tmp_path / "rows", changed)
    remarks = forecast_of(PrecomputeRequest(str(path), "model", str(root), encode=("text",))).remarks
    assert any("1 caption changed, of sample" in remark for remark in remarks)
    wanted = run(path, root)
    assert wanted.encoded == 1
    after = inputs(root)
    assert [name for name in after if after[name] != before[name]] == ["own.png"]
    again = run(manifest(tmp_path / "rows", [*changed]), root)
    assert (again.encoded, again.generation) == (0, wanted.generation)
    dropped = run(manifest(tmp_path / "rows", [{"id": row["id"], "caption": row["caption"]} for row in ROWS]), root)
    assert (dropped.encoded, set(inputs(root).values())) == (0, {digest_text("a")})


def test_a_run_without_text_empties_the_cells_whose_column_changed(two_encoders, tmp_path, root):
    rows = [{**row, "image": row["id"]} for row in ROWS]
    path = manifest(tmp_path / "rows", rows)
    for row in ROWS:
        (path.parent / row["id"]).write_bytes(b"picture")
    run(path, root)
    manifest(tmp_path / "rows", [{**row, SECOND: "d"} if row["id"] == "own.png" else row for row in rows])
    precompute_here(PrecomputeRequest(str(path), "model", str(root), encode=("latents",)))
    found = catalog(root)
    text = next(column for column in found.columns if column.encoder == "text")
    assert [found.ids[row] for row in range(len(found)) if not text.row_cells(row)[0].key] == ["own.png"]


def test_every_caption_of_a_sample_goes_with_the_column_and_a_policy_changes_captions_alone(two_encoders, tmp_path, root):
    path = manifest(tmp_path / "rows", [{"id": "x", "caption": ["a, b", "c"], SECOND: "{d|e}, f"}])
    policy = cs.CaptionPolicy(choose="all", shuffle_tags=True, variants=2, prefix="p ", wildcards=4, dropout=0.5)
    run(path, root, captions=policy)
    assert sorted(two_encoders.encoded()) == ["", "p a, b", "p b, a", "p c"]
    found = catalog(root)
    [column] = found.columns
    both = {caption: cell.input for caption, cell in zip(found.row_captions(0), column.row_cells(0), strict=True)}
    for caption, digest in both.items():
        assert digest.hex() == combined_digest({"caption": digest_text(caption), SECOND: digest_text("{d|e}, f")})


REFUSED = [
    (
        "caption.text_encodr_2",
        "b",
        r"a column 'caption.text_encodr_2', but .* caption.text_encoder_2; did you mean 'caption.text_encoder_2'\?",
    ),
    ("caption.", "b", r"a column 'caption.', but for this model there are caption.text_encoder and caption.text_encoder_2"),
    (SECOND, ["b", "c"], r"the column caption.text_encoder_2 must be one text, not \['b', 'c'\]"),
]


@pytest.mark.parametrize(("column", "value", "says"), REFUSED)
def test_a_row_with_a_column_of_no_encoder_or_one_that_is_no_text_fails_alone(two_encoders, tmp_path, root, column, value, says):
    report = run(manifest(tmp_path / "rows", [*ROWS, {"id": "x", "caption": "a", column: value}]), root)
    [failure] = report.failures
    assert (failure["sample"], failure["encoder"], report.encoded) == ("x", "source", 4)
    assert re.search(f"sample 'x'.*{says}", str(failure["reason"]))


@pytest.mark.parametrize(("column", "value", "says"), REFUSED)
def test_where_every_row_has_such_a_column_nothing_is_encoded(two_encoders, tmp_path, root, column, value, says):
    with pytest.raises(BadInput, match=f"sample 'x'.*{says}"):
        run(manifest(tmp_path / "rows", [{"id": "x", "caption": "a", column: value}]), root)
    assert not two_encoders.encoded()


def test_a_model_whose_encoders_read_one_caption_refuses_the_column_unless_no_text_is_encoded(work_here, tmp_path, root, capsys):
    path = manifest(tmp_path / "rows", [{**row, "image": row["id"]} for row in ROWS])
    for row in ROWS:
        (path.parent / row["id"]).write_bytes(b"picture")
    command = ["precompute", str(path), "--model", "model", "--store", str(root)]
    assert main([*command, "--encode", "text"]) == 2
    assert f"a column {SECOND!r}, but all text encoders of this model read one caption: rename the column" in capsys.readouterr().err
    assert precompute_here(PrecomputeRequest(str(path), "model", str(root), encode=("latents",))).complete
    assert fakes.catalog(root).extras[1] == json.dumps({SECOND: "b"}, separators=(",", ":"))


def test_the_plan_counts_them_and_show_and_ls_list_them(two_encoders, tmp_path, root, capsys):
    path = manifest(tmp_path / "rows")
    request = PrecomputeRequest(str(path), "model", str(root), encode=("text",))
    assert "3 samples have captions for text_encoder and text_encoder_2 alone" in forecast_of(request).remarks
    run(path, root)
    for command in (["ls", str(root), "--samples"], ["show", str(root), "own.png"]):
        assert main(command) == 0
        assert f"{SECOND}: b" in capsys.readouterr().out
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        own = [one.get("own_captions") for one in found.get("samples", found.get("in"))]
        expected = [None, {"text_encoder_2": "b"}, {"text_encoder_2": "a"}, {"text_encoder": "c"}]
        assert own == (expected if command[0] == "ls" else expected[1:2])
