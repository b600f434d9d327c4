"""Files that changed although their size and time did not, and files that look changed and are not."""

import io
import json
import os
import shutil
import tarfile
import time
from types import SimpleNamespace

import pytest

import cachestore as cs
from cachestore.cli import main
from cachestore.core.keys import Recipe
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.remarks import count_reread_files
from cachestore.jobs.start.forecast import forecast_of
from cachestore.jobs.start.here import precompute_here
from cachestore.sources.files import Folder
from cachestore.store.write.model_digests import load_digests, publish_digests
from tests import fakes
from tests.encode import tiny
from tests.fakes import catalog, planned

LONG_AGO = 9


def written(path, content):
    """A file with an old time. Its change time is another one than that of the same file before."""
    if path.exists():
        while time.time_ns() < path.stat().st_ctime_ns + 20_000_000:
            time.sleep(0.001)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def put_in_place(path, content):
    """Another file under the same name, with the same size and time."""
    written(path.with_name("other"), content).replace(path)


def swap_folder(path, content):
    """Another folder under the same name, with a file of the same size and time."""
    folder = path.parent
    shutil.copytree(folder, folder.with_name("other"), copy_function=shutil.copy2)
    written(folder.with_name("other") / path.name, content)
    folder.rename(folder.with_name("old"))
    folder.with_name("other").rename(folder)


def point_elsewhere(path, content):
    """A link to another file, in the place of the file."""
    other = written(path.parents[1] / "elsewhere" / path.name, content)
    path.unlink()
    path.symlink_to(other)


@pytest.fixture
def data(tmp_path):
    for n in range(5):
        written(tmp_path / f"data/{n}.png", b"picture %d" % n)
        (tmp_path / f"data/{n}.txt").write_text(f"caption {n}")
    return tmp_path / "data"


@pytest.fixture
def reads(monkeypatch):
    """The references of the files that are read, in order."""
    found: list[str] = []
    for name in ("read", "open"):
        real = getattr(Folder, name)
        monkeypatch.setattr(Folder, name, lambda folder, reference, real=real: found.append(reference) or real(folder, reference))
    return found


def run(data, root, **options):
    return precompute_here(PrecomputeRequest(str(data), "model", str(root), **options))


def cells(root, encoder="latents"):
    """By sample, the digests its cells were made from; empty for an empty cell."""
    found = catalog(root)
    columns = [column for column in found.columns if column.encoder == encoder]
    return {name: [cell.input.hex() for one in columns for cell in one.row_cells(row) if cell.key] for row, name in enumerate(found.ids)}


# Changed, with the same size and time


@pytest.mark.parametrize("replaced", [written, put_in_place, swap_folder, point_elsewhere])
def test_a_picture_replaced_by_one_of_the_same_size_and_time_is_encoded_again(data, root, makers, replaced):
    run(data, root)
    makers.encoded()
    replaced(data / "3.png", b"PICTURE 3")
    assert run(data, root).encoded == 1
    assert makers.encoded() == [b"PICTURE 3"]
    assert cells(root)["3.png"] == [fakes.digest_bytes(b"PICTURE 3")]


def test_a_value_of_another_encoder_is_dropped_where_its_picture_was_replaced(data, root, makers):
    run(data, root)
    written(data / "3.png", b"PICTURE 3")
    run(data, root, encode=("text",))
    assert cells(root)["3.png"] == []
    assert cells(root)["2.png"] == [fakes.digest_bytes(b"picture 2")]


def test_a_picture_replaced_after_a_run_was_stopped_is_encoded_again(data, root, monkeypatch):
    makers = fakes.Makers(options={"limit": 2})
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", makers)

    class Stop:
        def is_set(self):
            return sum(len(encoder.batches) for encoder in makers.made) >= 3

    with pytest.raises(cs.Incomplete):
        precompute_here(PrecomputeRequest(str(data), "model", str(root), encode=("latents",)), cancel=Stop())
    for n in range(5):
        written(data / f"{n}.png", b"PICTURE %d" % n)
    run(data, root, encode=("latents",))
    assert cells(root) == {f"{n}.png": [fakes.digest_bytes(b"PICTURE %d" % n)] for n in range(5)}


def pack(path, content):
    """A tar with one picture and an old time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return written(path, packed.getvalue())


def test_a_member_of_a_tar_that_was_replaced_by_one_of_the_same_size_and_time_is_encoded_again(tmp_path, root, makers):
    path = pack(tmp_path / "a.tar", b"picture")
    run(path, root, encode=("latents",))
    pack(path, b"PICTURE")
    assert run(path, root, encode=("latents",)).encoded == 1
    assert cells(root)["a.png"] == [fakes.digest_bytes(b"PICTURE")]


def test_a_tar_that_was_touched_while_it_was_worked_on_is_still_read_and_not_trusted(tmp_path, root, makers):
    path = pack(tmp_path / "a.tar", b"picture")
    makers.options["before_encode"] = lambda _items: path.chmod(0o600)
    assert run(path, root, encode=("latents",)).complete
    makers.options.clear()
    assert run(path, root, encode=("latents",)).encoded == 0


@pytest.fixture
def model(tmp_path):
    """The folder of a model, none of whose files changed lately."""
    folder = tiny.look_alike(tmp_path / "model")
    for path in folder.rglob("*.*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


def fingerprints(data, model, layout, **options):
    """What the encoders of a request would make, by encoder; and what is said of the model's files."""
    found = planned(layout, PrecomputeRequest(str(data), str(model), str(layout.root), **options))
    return {recipe.encoder: recipe.fingerprint for recipe in found.plan.recipes}, found.model_files


@pytest.mark.parametrize("replaced", [written, put_in_place])
def test_weights_replaced_by_some_of_the_same_size_and_time_are_another_model(data, model, layout, replaced):
    before, _files = fingerprints(data, model, layout)
    replaced(model / "vae/diffusion_pytorch_model.safetensors", b"VAE WEIGHTS")
    now, _files = fingerprints(data, model, layout)
    assert now["latents"] != before["latents"]
    assert now["text"] == before["text"]


def test_a_fingerprint_of_files_sees_weights_that_were_overwritten_in_place(model):
    before = cs.fingerprint([model / "vae"])
    written(model / "vae/diffusion_pytorch_model.safetensors", b"VAE WEIGHTS")
    assert cs.fingerprint([model / "vae"]) != before


# Changed in look alone


def touch_nothing_but_the_change_time(folder):
    for path in folder.glob("*.png"):
        path.chmod(0o600)


def copy_all(folder):
    shutil.copytree(folder, folder.with_name("copy"), copy_function=shutil.copy2)
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def link_all(folder):
    folder.with_name("backup").mkdir()
    for path in folder.glob("*.png"):
        os.link(path, folder.with_name("backup") / path.name)


@pytest.mark.parametrize("touched", [touch_nothing_but_the_change_time, copy_all, link_all])
def test_files_that_only_look_changed_are_read_once_and_not_encoded(data, root, makers, reads, touched):
    first = run(data, root)
    makers.encoded()
    touched(data)
    reads.clear()
    second = run(data, root)
    assert (second.encoded, second.reused, second.catalog_digest) == (0, 10 + 1, first.catalog_digest)
    assert {*reads} == {f"{n}.png" for n in range(5)}
    reads.clear()
    assert run(data, root).generation == second.generation
    assert (makers.encoded(), reads) == ([], [])


def test_what_a_run_of_another_encoder_has_read_again_is_remembered_too(data, root, makers, reads):
    run(data, root)
    touch_nothing_but_the_change_time(data)
    run(data, root, encode=("text",))
    reads.clear()
    assert run(data, root).encoded == 0
    assert reads == []


def test_a_file_touched_during_the_pass_is_not_reported_as_changed_and_a_replaced_one_is(data, root, makers):
    def replace(_items):
        (data / "1.png").chmod(0o600)
        written(data / "2.png", b"PICTURE 2")

    makers.options["before_encode"] = replace
    assert run(data, root, encode=("latents",)).changed == ("2.png",)


# Reading all again


def forging(monkeypatch):
    """Let the change time prove nothing, as on a file system that has none."""
    monkeypatch.setattr("cachestore.files.stat_record._changed_ns", lambda _status: None)


def test_a_recheck_finds_what_no_stat_record_shows(data, root, makers, monkeypatch):
    forging(monkeypatch)
    run(data, root)
    makers.encoded()
    written(data / "3.png", b"PICTURE 3")
    assert run(data, root).encoded == 0, "this file system shows nothing"
    report = run(data, root, recheck=True)
    assert makers.encoded() == [b"PICTURE 3"]
    assert report.rechecked == {"samples": 5, "changed": 1, "names": ["3.png"], "model_files": 0, "model_files_changed": 0}
    assert cells(root)["3.png"] == [fakes.digest_bytes(b"PICTURE 3")]


def test_a_recheck_of_files_that_did_not_change_encodes_nothing_and_says_so(data, root, makers, reads):
    first = run(data, root)
    makers.encoded()
    reads.clear()
    report = run(data, root, recheck=True)
    assert {*reads} == {f"{n}.png" for n in range(5)}
    assert (report.encoded, report.generation, makers.encoded()) == (0, first.generation, [])
    assert (report.rechecked["samples"], report.rechecked["changed"], report.rechecked["names"]) == (5, 0, [])


def test_a_first_run_with_recheck_has_read_all_and_nothing_had_changed(data, root, makers):
    assert {**run(data, root, recheck=True).rechecked}.items() >= {"samples": 5, "changed": 0}.items()


def test_a_run_without_recheck_reports_none(data, root, makers):
    assert run(data, root).rechecked == {}


def test_a_recheck_counts_a_sample_once_however_many_values_are_made_of_it(data, root, makers, monkeypatch):
    forging(monkeypatch)
    run(data, root, encode=("latents",), resolution=(256, 512))
    written(data / "3.png", b"PICTURE 3")
    report = run(data, root, encode=("latents",), resolution=(256, 512), recheck=True)
    assert (report.rechecked["samples"], report.rechecked["changed"]) == (5, 1)


def test_a_recheck_reads_the_pictures_of_values_that_it_does_not_make(data, root, makers, monkeypatch):
    forging(monkeypatch)
    run(data, root)
    written(data / "3.png", b"PICTURE 3")
    run(data, root, encode=("text",), recheck=True)
    assert cells(root)["3.png"] == []


def test_a_recheck_that_joins_an_unfinished_pass_reads_what_that_has_recorded(data, root, monkeypatch):
    forging(monkeypatch)
    makers = fakes.Makers(options={"limit": 2})
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", makers)

    class Stop:
        def is_set(self):
            return sum(len(encoder.batches) for encoder in makers.made) >= 3

    with pytest.raises(cs.Incomplete):
        precompute_here(PrecomputeRequest(str(data), "model", str(root), encode=("latents",)), cancel=Stop())
    for n in range(5):
        written(data / f"{n}.png", b"PICTURE %d" % n)
    run(data, root, encode=("latents",), recheck=True)
    assert cells(root) == {f"{n}.png": [fakes.digest_bytes(b"PICTURE %d" % n)] for n in range(5)}


def test_a_plan_with_recheck_says_what_changed_and_changes_nothing(data, root, makers, monkeypatch, reads):
    forging(monkeypatch)
    before = run(data, root)
    written(data / "3.png", b"PICTURE 3")
    request = PrecomputeRequest(str(data), "model", str(root))
    assert forecast_of(request).to_encode == 0
    reads.clear()
    found = forecast_of(PrecomputeRequest(str(data), "model", str(root), recheck=True))
    assert {**found.rechecked}.items() >= {"samples": 5, "changed": 1, "names": ["3.png"]}.items()
    assert (found.to_encode, found.present, sorted({*reads})) == (1, 10, [f"{n}.png" for n in range(5)])
    assert catalog(root).generation == before.generation


def test_the_command_and_a_config_file_take_recheck(data, root, makers, capsys, tmp_path):
    run(data, root)
    (tmp_path / "c.toml").write_text("recheck = true\n")
    for how in (["--recheck"], ["--config", str(tmp_path / "c.toml")]):
        assert main(["precompute", str(data), "--model", "model", "--store", str(root), "--plan-only", "--json", *how]) == 0
        assert json.loads(capsys.readouterr().out)["rechecked"]["samples"] == 5


def test_python_takes_recheck(data, root, makers):
    cs.precompute(data, model="model", store=root, inline=True)
    assert cs.precompute(data, model="model", store=root, inline=True, recheck=True).rechecked["samples"] == 5
    assert cs.plan(data, model="model", store=root, recheck=True).rechecked["samples"] == 5


def test_a_catalog_does_not_record_that_a_run_was_a_recheck(data, root, makers):
    run(data, root, recheck=True)
    assert all("recheck" not in hints for hints in catalog(root).request.values())


def test_a_recheck_reads_the_model_again_and_what_it_found_is_remembered(data, model, layout, monkeypatch):
    forging(monkeypatch)
    before, _files = fingerprints(data, model, layout)
    written(model / "vae/diffusion_pytorch_model.safetensors", b"VAE WEIGHTS")
    assert fingerprints(data, model, layout)[0] == before, "this file system shows nothing"
    found, files = fingerprints(data, model, layout, recheck=True)
    assert found["latents"] != before["latents"]
    assert files == {"model_files": 7, "model_files_changed": 0}, "there is no data set yet that was made with others"
    assert fingerprints(data, model, layout)[0] == found


def test_files_of_the_model_that_are_not_as_the_data_set_was_made_with_are_counted():
    def made(**files):
        return Recipe("latents", {"files": files}, {})

    plan, previous = SimpleNamespace(recipes=[made(a="1", b="2", c="3")]), SimpleNamespace(recipes={"": made(a="1", b="other")})
    assert count_reread_files(plan, previous) == {"model_files": 3, "model_files_changed": 1}  # pyright: ignore[reportArgumentType]


def test_two_digests_of_one_stat_record_count_as_none(layout):
    publish_digests(layout, "host", {"a": "1", "b": "1"})
    publish_digests(layout, "host", {"a": "2", "b": "1"})
    assert load_digests(layout, "host") == {"b": "1"}
