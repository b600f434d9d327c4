"""`export --remove` removes what exports wrote and nothing else; and an export into a folder that may be misspelt."""

import json
import os

import pytest

from cachestore.cli import ERROR, FAILURES, OK, USAGE, main
from cachestore.core.errors import BadInput
from cachestore.trainers.export_target import NOTE, Target, remove_export
from tests.train import stores


@pytest.fixture
def folder(tmp_path):
    """A folder with files of an export, one of them in a sub-folder, and files of others."""
    target = Target(tmp_path / "photos", "sd-scripts", may_replace=False)
    assert all(target.put(path, path.encode()) for path in ("a.npz", "b.npz", "_cache/c.npz", "_cache/in/d.npz"))
    target.close()
    (target.folder / "a.png").write_bytes(b"a picture")
    (target.folder / "_other").mkdir()
    return target.folder


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_files_of_one_trainer_can_be_removed_alone(folder):
    other = Target(folder, "ai-toolkit", may_replace=False)
    assert other.put("_latent_cache/a.safetensors", b"theirs")
    other.close()
    assert remove_export(folder, apply=False).formats == {"ai-toolkit": 1, "sd-scripts": 4}
    assert remove_export(folder, "sd-scripts").formats == {"sd-scripts": 4}
    assert (folder / "_latent_cache" / "a.safetensors").read_bytes() == b"theirs"
    assert list(Target(folder, "", may_replace=False).listed()) == ["_latent_cache/a.safetensors"]
    with pytest.raises(BadInput):
        remove_export(folder, "sd-scripts")


def test_what_an_export_wrote_is_removed_and_nothing_else(folder):
    assert remove_export(folder, apply=False).removed == 4
    assert len(files(folder)) == 9
    report = remove_export(folder)
    assert (report.removed, report.bytes, report.gone, report.kept) == (4, len("a.npzb.npz_cache/c.npz_cache/in/d.npz"), 0, {})
    assert files(folder) == ["_other", "a.png"]


def test_what_was_changed_or_is_gone_is_said_and_stays(folder):
    (folder / "_cache" / "c.npz").write_bytes(b"changed")
    (folder / "b.npz").unlink()
    report = remove_export(folder)
    assert (report.removed, report.gone, list(report.kept)) == (2, 1, ["_cache/c.npz"])
    assert files(folder) == [NOTE, "_cache", "_cache/c.npz", "_other", "a.png"]
    assert list(remove_export(folder).kept) == ["_cache/c.npz"]


@pytest.mark.parametrize("path", ["../outside", "/outside", "_link/outside", "."])
def test_a_note_cannot_lead_out_of_the_folder(folder, path):
    outside = folder.parent / "outside"
    outside.write_bytes(b"mine")
    os.symlink(folder.parent, folder / "_link")
    digest = json.loads((folder / NOTE).read_text())["files"]
    target = Target(folder.parent / "x", "sd-scripts", may_replace=False)
    target.put("outside", b"mine")
    path = str(outside) if path == "/outside" else path
    (folder / NOTE).write_text(json.dumps({"format": "cachestore-export/1", "files": {path: target.listed()["outside"]} | digest}))
    report = remove_export(folder)
    assert (report.removed, list(report.kept), outside.read_bytes()) == (4, [path], b"mine")


def test_a_folder_without_a_note_is_refused(tmp_path):
    (tmp_path / "a.npz").touch()
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadInput):
            remove_export(folder)
    (tmp_path / NOTE).write_text("{}")
    with pytest.raises(BadInput):
        remove_export(tmp_path)
    assert (tmp_path / "a.npz").exists()


# The command


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def store(tmp_path):
    return stores.make_store(tmp_path / "store", [stores.Row("a"), stores.Row("b")], stores.recipes())


def export(store, folder):
    return ["export", store, "--format", "webdataset", "-o", folder]


def test_the_command_removes_what_it_wrote(run, store, tmp_path):
    code, out, err = run(*export(store, tmp_path / "tars"))
    assert (code, "a new folder" in out, "is made new" in err) == (OK, True, True)
    assert "a new folder" not in run(*export(store, tmp_path / "tars"))[1]
    assert "would be removed" in run("export", "--remove", tmp_path / "tars", "--dry-run")[1]
    [tar, *_more] = (tmp_path / "tars").glob("*.tar")
    tar.write_bytes(b"changed")
    code, out, _err = run("export", "--remove", tmp_path / "tars")
    assert (code, f"kept: {tar.name}: it was changed" in out) == (FAILURES, True)
    tar.unlink()
    code, out, _err = run("export", "--remove", tmp_path / "tars", "--json")
    assert (code, json.loads(out)["gone"], files(tmp_path / "tars")) == (OK, 1, [])


@pytest.mark.parametrize("more", [["store"], ["--name", "x"], ["-o", "x"]])
def test_remove_takes_the_folder_and_a_format_alone(run, tmp_path, more):
    assert run("export", "--remove", tmp_path, *more)[0] == USAGE


@pytest.mark.parametrize("missing", ["--format", "-o"])
def test_an_export_without_a_format_or_folder_is_a_usage_error(run, store, missing):
    arguments = export(store, "x")
    at = arguments.index(missing)
    assert run(*arguments[:at], *arguments[at + 2 :])[0] == USAGE


def test_a_folder_whose_parent_is_not_there_is_refused_with_the_one_that_is(run, store, tmp_path):
    (tmp_path / "photos").mkdir()
    code, _out, err = run(*export(store, tmp_path / "phots" / "cache"))
    assert (code, f"did you mean {str(tmp_path / 'photos')!r}" in err) == (ERROR, True)
    assert not (tmp_path / "phots").exists()


def test_a_folder_that_may_be_misspelt_is_said_or_asked_for(run, store, tmp_path, monkeypatch):
    from cachestore.cli import export as command

    (tmp_path / "photos").mkdir()
    assert "there is a folder 'photos' beside it" in run(*export(store, tmp_path / "phots"))[2]
    asked = []
    monkeypatch.setattr(command, "ask", lambda question, _answers, default: asked.append(question) or default)
    code, _out, _err = run(*export(store, tmp_path / "photo"))
    assert (code, (tmp_path / "photo").exists(), "Did you mean 'photos'" in asked[0]) == (ERROR, False, True)
    assert run(*export(store, tmp_path / "elsewhere"))[0] == OK
    assert len(asked) == 1
