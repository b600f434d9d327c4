"""Exchanged tars: what a data set has comes back from them; whoever reads them needs no code of ours; what is wrong in them is refused."""

import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

import cachestore as cs
from cachestore.care.gc import mark
from cachestore.cli import FAILURES, OK, main
from cachestore.core.errors import BadInput, BadUsage, Incomplete, RecipeMismatch, WriteFailed
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Key, Recipe
from cachestore.files.paths import Layout, Mode
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import list_segments, open_layout
from cachestore.store.write import publish as publishing
from cachestore.trainers import export_target
from cachestore.trainers.webdataset import exporting as tar_exporting
from tests import fakes, pages
from tests.fakes import asks_for
from tests.leaks import held
from tests.train.stores import Row, make_store, recipes

ROWS = (
    Row("a/one.png", ("a red fox, in snow", "ein grüner Vogel"), controls=((64, 48),), has_mask=True, extras='{"weight":0.5}'),
    Row("two.v2.png", ("ein grüner Vogel",), (48, 64)),
    Row("../odd\n☃", ("",), has_mask=True),
    Row("a prompt", ("a prompt", "a red fox, in snow"), None),
)


MADE = replace(recipes(), masks=Recipe("mask", {"kind": "masks"}, {"format": 1, "stored": "mask", "factor": 8}))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("tars") / "store", ROWS, MADE)


@pytest.fixture(scope="module")
def exported(store):
    send(store, store.parent / "exported")
    return store.parent / "exported"


@pytest.fixture
def sent(exported, out):
    """A copy of the exported tars."""
    return shutil.copytree(exported, out)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def send(store, out, **options):
    return cs.export_cache(store, format="webdataset", folder=out, **options)


def bring(folder, store, **options):
    return cs.import_cache("webdataset", folder, store=store, **options)


def held_by(store):
    """Everything that a store's data set is: rows, recipes, cells, and the bytes of each entry."""
    catalog = newest_catalog(Layout(Path(store)), "train")
    assert catalog is not None
    with cs.open(store) as reader:
        entries = {key: (reader.get_raw([key])[0], reader.describe(key).meta) for key in list(reader.keys())}
    plain = {
        key: ({name: (dtype, shape, bytes(buffer)) for name, (dtype, shape, buffer) in tensors.items()}, "tokens" in meta)
        for key, (tensors, meta) in entries.items()
    }
    rows = list(zip(catalog.ids, map(catalog.row_captions, range(len(catalog))), catalog.extras, strict=True))
    columns = {(one.encoder, one.role): [one.row_cells(row) for row in range(len(catalog))] for one in catalog.columns}
    return rows, columns, catalog.recipes, catalog.texts, catalog.prompts, plain


def repacked(path, change):
    """Write a tar again with its members changed: `change` gets and returns {name: bytes}."""
    with tarfile.open(path) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # pyright: ignore[reportOptionalMemberAccess]
    with tarfile.open(path, "w") as tar:
        for name, data in change(members).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def rewritten(path, change, key="00000000"):
    """Change the JSON of a sample, as somebody does who knows the format: with the digests that belong to it."""

    def other(members):
        body = json.loads(members[f"{key}.json"])
        body["sha256"].pop("json")
        change(body, members)
        return {**members, f"{key}.json": json.dumps(body).encode()}

    repacked(path, other)


def test_everything_that_a_data_set_has_comes_back(tmp_path, store, out):
    report = send(store, out)
    assert (report.complete, report.samples, report.written, report.failures) == (True, 4, 2, ())
    before = held()
    back = bring(out, tmp_path / "back")
    assert not held() - before
    assert (back.complete, back.report.samples, back.report.failed, back.unmatched, back.remarks) == (True, 4, 0, (), ())
    assert held_by(tmp_path / "back") == held_by(store)
    assert cs.verify(tmp_path / "back").ok
    send(tmp_path / "back", tmp_path / "again")
    assert [path.read_bytes() for path in tars(tmp_path / "again")] == [path.read_bytes() for path in tars(out)]


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_tars_are_not_imported_under_a_name_that_sessions_use(tmp_path, sent, monkeypatch, moment):
    with cs.open(tmp_path / "other", mode="a") as other:
        if moment == "before":
            other.session("train")
        else:
            fakes.overtaken(monkeypatch, publishing, "check_keys", lambda: other.session("train"))
        with pytest.raises(BadInput, check=asks_for("name")):
            bring(sent, other.layout.root)
        assert other.dataset("train").made == "published"


def test_imported_tars_are_recorded_as_imported(tmp_path, sent):
    bring(sent, tmp_path / "other")
    with cs.open(tmp_path / "other", mode="a") as other:
        assert other.dataset("train").made == "imported"
        with pytest.raises(BadInput, check=asks_for("name")):
            other.session("train")


def tars(folder):
    return sorted(folder.glob("*.tar"))


def test_equal_data_sets_give_equal_bytes_and_a_second_export_writes_nothing(tmp_path, sent):
    other = make_store(tmp_path / "other", ROWS, MADE)
    report = send(other, sent)
    assert (report.written, report.unchanged) == (0, 2)


def test_a_second_import_reads_no_tensor_and_makes_no_generation(tmp_path, sent, monkeypatch):
    first = bring(sent, tmp_path / "back").report
    monkeypatch.delattr("cachestore.trainers.webdataset.groups.read_safetensors")
    again = bring(sent, tmp_path / "back").report
    assert (again.encoded, again.reused, again.generation) == (0, first.encoded, 1)


def test_tarfile_and_safetensors_alone_read_it(store, sent):
    with tarfile.open(sent / "train-000000.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # pyright: ignore[reportOptionalMemberAccess]
        assert all((member.mtime, member.uid, member.mode) == (0, 0, 0o644) for member in tar)
    body, tensors = json.loads(files["00000000.json"]), load(files["00000000.safetensors"])
    assert (body["id"], body["captions"]) == (ROWS[0].id, list(ROWS[0].captions))
    assert files["00000000.txt"].decode() == "\n".join(ROWS[0].captions)
    assert {"latents.moments", "control_latents.moments", "pooled_prompt_embeds", "pooled_prompt_embeds.2"} <= tensors.keys()
    with cs.open(store) as reader:
        for value in body["values"]:
            for cell in value["cells"]:
                stored = reader.get(cell["key"], as_numpy=True)
                assert all(np.array_equal(stored[name], tensors[there]) for name, there in cell["tensors"].items())
    assert hashlib.sha256(files["00000000.safetensors"]).hexdigest() == body["sha256"]["safetensors"]


@pytest.mark.torch
def test_the_lines_of_the_page_read_a_sample(sent, monkeypatch):
    monkeypatch.chdir(sent.parent)
    [(_kind, lines)] = pages.blocks(pages.text_of("interop.md"), "python")
    names = {}
    exec(lines.replace("FOLDER", sent.name), names)
    assert names["sample"]["id"] == ROWS[0].id
    assert "latents.moments" in names["tensors"]


def test_tars_are_bounded_and_those_of_a_longer_export_go(tmp_path, store, out, monkeypatch):
    monkeypatch.setattr(tar_exporting, "TAR_BYTES", 1)
    assert send(store, out).written == 5
    assert [path.name for path in tars(out)] == [*(f"train-{n:06d}.tar" for n in range(4)), "train-texts-000000.tar"]
    assert bring(out, tmp_path / "back").report.samples == 4
    (out / "train-000009.tar").write_bytes(b"somebody else's")
    monkeypatch.undo()
    report = send(store, out)
    assert (report.foreign, report.complete) == (("train-000009.tar",), False)
    assert [path.name for path in tars(out)] == ["train-000000.tar", "train-000009.tar", "train-texts-000000.tar"]


def test_an_export_that_died_leaves_whole_tars_and_the_same_call_finishes(tmp_path, store, out, monkeypatch):
    monkeypatch.setattr(tar_exporting, "TAR_BYTES", 1)
    send(store, tmp_path / "whole")
    whole = {path.name: path.read_bytes() for path in tars(tmp_path / "whole")}
    write, calls = export_target.write_outside, []

    def die(final, data):
        calls.append(final)
        if len(calls) == 4:
            (final.parent / ".half.cachestore-tmp").write_bytes(data[:100])
            raise WriteFailed("the disk is full")
        write(final, data)

    monkeypatch.setattr(export_target, "write_outside", die)
    with pytest.raises(WriteFailed):
        send(store, out)
    monkeypatch.setattr(export_target, "write_outside", write)
    there = {path.name: path.read_bytes() for path in tars(out)}
    assert there
    assert there.items() < whole.items()
    assert send(store, out).complete
    assert {path.name: path.read_bytes() for path in tars(out)} == whole


def test_a_sample_that_was_not_encoded_is_no_part_of_the_tars(tmp_path, out):
    store = make_store(tmp_path / "store", [Row("1"), Row("2", fails=True)], recipes())
    [failure] = send(store, out).failures
    assert failure["sample"] == "2"
    back = bring(out, tmp_path / "back")
    assert (back.complete, back.report.samples) == (True, 1)
    assert back.remarks == ("the data set had 2 samples when it was exported; 1 are in these tars",)


def test_prompts_and_the_empty_caption_come_back(tmp_path, out):
    made = recipes()
    root = make_store(tmp_path / "store", [Row("1")], made, prompts=("", "a cat", "blurry"))
    layout = Layout(root)
    catalog = newest_catalog(layout, "train")
    assert catalog is not None
    fakes.publish_catalog(layout, replace(catalog, prompts=[("a cat", ""), ("a cat", "blurry")]))
    send(root, out)
    bring(out, tmp_path / "back")
    assert held_by(tmp_path / "back") == held_by(root)
    with cs.open(tmp_path / "back") as reader:
        assert caption_key(made.text.fingerprint, "") in reader


def test_damaged_tensors_cost_their_sample_and_a_whole_copy_mends_it(tmp_path, store, sent, capsys):
    whole = (sent / "train-000000.tar").read_bytes()
    with tarfile.open(sent / "train-000000.tar") as tar:
        at = tar.getmember("00000001.safetensors").offset_data + 900
    (sent / "train-000000.tar").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert main(["import", "webdataset", str(sent), "--store", str(tmp_path / "back"), "--json"]) == FAILURES
    body = json.loads(capsys.readouterr().out)
    assert {one["sample"] for one in body["failures"]} == {"two.v2.png"}
    assert all("00000001 in" in one["reason"] and "SHA-256" in one["reason"] for one in body["failures"])
    (sent / "train-000000.tar").write_bytes(whole)
    assert main(["import", "webdataset", str(sent), "--store", str(tmp_path / "back")]) == OK
    assert held_by(tmp_path / "back") == held_by(store)


def test_a_tar_of_somebody_else_needs_neither_keys_nor_digests_of_inputs(tmp_path, store, sent):

    def plain(body, _members):
        for name in ("texts", "samples", "images"):
            body.pop(name, None)
        for value in body["values"]:
            value["cells"] = [{"tensors": cell["tensors"]} for cell in value["cells"]]

    for key in ("00000000", "00000001", "00000002", "00000003"):
        rewritten(sent / "train-000000.tar", plain, key)
    assert bring(sent, tmp_path / "back").complete
    (ours, before), (theirs, now) = ((newest_catalog(Layout(root), "train"), cs.open(root)) for root in (store, tmp_path / "back"))
    with before, now:
        for column, its in zip(sorted(ours.columns, key=lambda one: (one.encoder, one.role)), theirs.columns, strict=True):
            assert column.at == its.at
            was, there = ([Key(key) for key in one.keys] for one in (column, its))
            assert before.get_raw(was) == now.get_raw(there)
            assert (was == there) is (column.role == "caption")


def links(kind):
    def write(path):
        with tarfile.open(path, "a") as tar:
            member = tarfile.TarInfo("00000009.json")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)

    return write


def added(name, data=b"{}"):
    return lambda path: repacked(path, lambda members: {**members, name: data})


def without(name):
    return lambda path: repacked(path, lambda members: {one: data for one, data in members.items() if one != name})


def twice(path):
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("00000000.json"))


def huge(path):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.json")
        member.pax_headers = {"comment": "x" * (2 << 20)}
        tar.addfile(member)


def sparse(path):
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo("a.json")
        member.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(member)


def cut(where):
    return lambda path: path.write_bytes(path.read_bytes()[: where(path.read_bytes())])


def stated(change):
    return lambda path: rewritten(path, change)


def reweighted(members):
    return {**members, "00000000.json": members["00000000.json"].replace(b"0.5", b"0.6")}


def first_cell(body):
    return body["values"][0]["cells"][0]


def counted(channels):
    def change(body, _members):
        for recipe in body["recipes"].values():
            if "channels" in recipe["read"]:
                recipe["read"]["channels"] = channels

    return change


HOSTILE = {
    "cut within a member": (cut(lambda raw: raw.index(b"00000001.safetensors") + 600), "ends within"),
    "cut where a member ends": (cut(lambda raw: raw.rindex(b"00000003.txt")), "ends before the end"),
    "empty": (cut(lambda raw: 0), "ends before the end"),
    "no tar": (lambda path: path.write_bytes(b"x" * 2000), "is not a plain tar"),
    "a header of zeros": (lambda path: path.write_bytes(bytes(512) + path.read_bytes()[512:]), "is damaged at byte"),
    "a member twice": (twice, "two members"),
    "a path that leads out": (added("../../escaped.json"), "leads out of the folder"),
    "a path from the root": (added("/escaped.json"), "leads out of the folder"),
    "a name that cannot be printed": (added("a\x1b[31m.json"), "leads out of the folder or cannot be printed"),
    "a symbolic link": (links(tarfile.SYMTYPE), "is a link"),
    "a hard link": (links(tarfile.LNKTYPE), "is a link"),
    "a device": (links(tarfile.CHRTYPE), "is a link, a device"),
    "a fifo": (links(tarfile.FIFOTYPE), "is a link, a device"),
    "holes": (sparse, "a file with holes|damaged"),
    "a huge header": (huge, "a header of"),
    "no JSON": (without("00000001.json"), "no 00000001.json"),
    "no tensors": (without("00000001.safetensors"), "no 00000001.safetensors"),
    "another caption": (added("00000000.txt", b"a dog"), "is not the caption"),
    "JSON of others": (added("00000000.json", b'{"caption": "a cat"}'), 'needs "format": "cachestore-exchange/1"'),
    "no JSON at all": (added("00000000.json", b"\xff\x00"), "cannot be imported"),
    "a changed JSON": (
        lambda path: repacked(path, lambda m: {**m, "00000000.json": m["00000000.json"].replace(b"0.5", b"0.6")}),
        "SHA-256",
    ),
    "deep JSON": (added("00000000.json", b"[" * 100_000), "cannot be imported"),
    "another recipe": (stated(lambda body, _m: next(iter(body["recipes"].values()))["make"].update(model="x")), "it was changed"),
    "channels that are no number": (stated(counted([4])), "its channels is"),
    "another key": (stated(lambda body, _m: body["values"][-1]["cells"][0].update(key="0" * 32)), "is not that of its caption"),
    "too few values": (stated(lambda body, _m: body["values"][-1]["cells"].pop()), "values of the role"),
    "a lacking tensor": (stated(lambda body, _m: first_cell(body)["tensors"].clear()), "has no tensor"),
    "a size that is none": (stated(lambda body, _m: first_cell(body).update(size=[1])), "size has 1 numbers"),
    "a number that is none": (stated(lambda body, _m: first_cell(body).update(size=[1, 1e400])), "cannot be imported"),
    "no digest": (stated(lambda body, _m: body.pop("sha256")), "cannot be imported"),
    "the same sample twice": (stated(lambda body, _m: body.update(id="two.v2.png")), "are both the sample"),
    "another caption policy": (stated(lambda body, _m: body.update(texts={"choose": "all"})), "data sets with other captions"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_in_a_tar_is_refused_before_anything_is_written(tmp_path, sent, name):
    forge, says = HOSTILE[name]
    forge(sent / "train-000000.tar")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=says) as raised:
        bring(sent, tmp_path / "back")
    assert "train-000000.tar" in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


UNFIT = {
    "another tensor": (lambda made: made | {"more": np.zeros(1, np.float32)}, "is only in one of"),
    "NaN": (lambda made: made | {"latents.moments": np.full_like(made["latents.moments"], np.nan)}, "NaN"),
    "another shape": (lambda made: made | {"latents.moments": np.zeros((8, 3, 3), np.float32)}, "has the shape"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_fail_with_the_name_of_their_file(tmp_path, sent, name):
    forge, says = UNFIT[name]

    def change(body, members):
        members["00000000.safetensors"] = save(forge(load(members["00000000.safetensors"])))
        body["sha256"]["safetensors"] = hashlib.sha256(members["00000000.safetensors"]).hexdigest()

    rewritten(sent / "train-000000.tar", change)
    report = bring(sent, tmp_path / "back").report
    assert {one["sample"] for one in report.failures} == {ROWS[0].id}
    assert all(says in one["reason"] and "00000000 in" in one["reason"] for one in report.failures)


def test_text_whose_parts_do_not_join_fails(tmp_path, sent):
    def change(body, members):
        made = load(members["00000003.safetensors"])
        members["00000003.safetensors"] = save(made | {"prompt_embeds.text_encoder": made["prompt_embeds.text_encoder"][:4]})
        body["sha256"]["safetensors"] = hashlib.sha256(members["00000003.safetensors"]).hexdigest()

    rewritten(sent / "train-000000.tar", change, "00000003")
    [failure] = bring(sent, tmp_path / "back").report.failures
    assert (failure["sample"], failure["encoder"]) == ("a prompt", "text")
    assert "cannot be joined to 'prompt_embeds'" in failure["reason"]


def test_options_of_a_trainers_format_are_refused_with_their_names(store, out):
    with pytest.raises(BadInput, check=asks_for("family")):
        send(store, out, family="flux", leave_out=["masks"])
    with pytest.raises(BadInput, check=asks_for("data")):
        bring(out, store, data="data", claims={"model": "m"})


def test_nothing_to_import_is_said_in_a_sentence(tmp_path, store):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadUsage):
        bring(tmp_path / "empty", tmp_path / "back")
    with pytest.raises(BadInput):
        bring(tmp_path / "nowhere", tmp_path / "back")
    tarfile.open(tmp_path / "empty" / "a.tar", "w").close()
    with pytest.raises(BadUsage):
        bring(tmp_path / "empty", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_other_values_under_the_name_are_replaced_only_if_that_is_said(tmp_path, sent):
    other = make_store(tmp_path / "other", [Row("1")], recipes(stored="mean"))
    with pytest.raises(RecipeMismatch, check=asks_for("name")):
        bring(sent, other)
    assert bring(sent, other, name="more").report.generation == 1
    assert bring(sent, other, replace=True).report.generation == 2


@pytest.mark.parametrize("replace", [False, True])
def test_what_a_program_published_is_never_replaced(tmp_path, sent, replace):
    key = cs.key("tars", "own")
    with cs.open(tmp_path / "store", mode="a") as store, store.session("train") as session:
        session.put(key, {"x": np.ones(2)})
        session.set("cat", x=key)
    with pytest.raises(BadInput, check=asks_for("name")):
        bring(sent, tmp_path / "store", replace=replace)
    with cs.open(tmp_path / "store") as store:
        assert (list(store.dataset("train")), len(store)) == (["cat"], 1)


def test_entries_that_gc_has_marked_are_copied_and_outlive_their_segments(tmp_path, sent):
    first = bring(sent, tmp_path / "store").report
    layout = open_layout(Layout(tmp_path / "store"))
    marked = list_segments(layout)
    mark(layout, sorted(marked))
    again = bring(sent, tmp_path / "store", name="again").report
    assert (again.complete, again.encoded, again.reused) == (True, 0, first.encoded)
    for digest in marked:
        layout.segment(digest).unlink()
    with cs.open(tmp_path / "store") as store:
        rows = store.dataset("again")
        assert not store.missing([key for part in rows.parts for key in map(bytes, rows.lists(part)[1])])


def test_a_store_that_an_import_makes_is_the_groups_if_that_is_asked_for(tmp_path, sent):
    assert "is shared with the group" in bring(sent, tmp_path / "back", access="group").remarks[-1]
    assert open_layout(Layout(tmp_path / "back")).mode is Mode.GROUP
    with pytest.raises(BadInput):
        bring(sent, tmp_path / "back", access="private")


def test_a_cancelled_import_is_finished_by_the_same_call(tmp_path, store, sent):
    class After:
        calls = 0

        def is_set(self):
            self.calls += 1
            return self.calls > 6

    with pytest.raises(Incomplete):
        bring(sent, tmp_path / "back", cancel=After())
    with cs.open(tmp_path / "back") as stopped:
        taken = len(stopped)
    again = bring(sent, tmp_path / "back")
    assert again.complete
    assert taken == again.report.reused > 0, "what was imported is kept"
    assert held_by(tmp_path / "back") == held_by(store)
