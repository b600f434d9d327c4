"""What every command promises: exit codes, one JSON object of a fixed shape, and nothing that a terminal would obey.

What commands refuse that is empty, missing, misspelt or foreign is tested by the table of `tests/test_nothing.py`.
"""

import json
import os
import re
import shlex

import pytest

import cachestore as cs
from cachestore.cli import COMMANDS, DAMAGE, ERROR, FAILURES, HIDDEN, NO_STORE, OK, failed_values, main, near_to, printable
from cachestore.core import errors
from cachestore.files.paths import Layout
from cachestore.jobs.start import launching
from cachestore.store.read import reader as reading
from cachestore.store.read.snapshot import list_segments
from tests import fakes
from tests.shares import share
from tests.train import stores

pytestmark = pytest.mark.processes

USAGE = 2
ON_STORES = ("status", "verify", "repair", "stats", "ls", "show", "why", "report", "gc", "compact", "relocate", "forget", "drop", "doctor")
OF_SOMETHING = {"show": ["0.png"], "why": ["0.png"], "drop": ["train"], "forget": ["0.png"]}
"""What commands need that are about a sample or a data set."""


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", 3)


@pytest.fixture
def store(tmp_path, data, makers, capsys):
    assert cs.precompute(data, model="model", store=tmp_path / "store", inline=True).complete
    return tmp_path / "store"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process, with a worker's part: (exit code, stdout, stderr)."""
    fakes.work_here(monkeypatch)

    def call(*arguments):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    """Runs a command with --json: (exit code, the object)."""

    def call(*arguments):
        code, out, _err = run(*arguments, "--json")
        return code, json.loads(out)

    return call


def arguments_of(command, store):
    """A command with the least it needs; a report is written beside the store."""
    if command == "report":
        return [command, store, "-o", f"{store}.html"]
    if command == "relocate":
        data = store.parent / "data"
        return [command, store, "--source", f"{data}={data}"]
    return [command, store, *OF_SOMETHING.get(command, [])]


def flip(store):
    """Change a byte of a sample's latents; returns their key."""
    return str(fakes.flip_entry(store, "1.png", "latents"))


# Exit codes


def test_forget_says_in_words_what_it_did_what_stays_and_what_is_beyond_it(run, run_json, store, data):
    code, out, _err = run("forget", store, "1.png", "--dry-run")
    assert (code, out.splitlines()[0]) == (OK, "train: would be published without it as generation 2")
    code, out, _err = run("forget", store, "1.png")
    assert (code, out.splitlines()[0]) == (OK, "train: published without it as generation 2")
    assert "generation 1 of 'train' names it until `cachestore gc` removes it" in out
    assert f"note: remove it from its source ({data}) too" in out
    code, out, _err = run("forget", store, "1.png", "--now")
    assert (code, out.splitlines()[0].partition(" removed")[0]) == (OK, "2 values, 1 older generation and 1 plan")
    assert "trainings that run now" in out
    code, report = run_json("forget", store, "0.png", "2.png", "--now")
    assert (code, report["generations"], report["values"], report["left"]) == (OK, {"train": 3}, 4, [])
    assert run("forget", store, "0.png")[0] == ERROR
    assert run("verify", store)[0] == OK


def test_forget_ends_with_another_code_while_something_is_left(run, store):
    layout = Layout(store)
    layout.quarantine.mkdir(exist_ok=True)
    (layout.quarantine / "old").write_text("of 1.png")
    code, out, _err = run("forget", store, "1.png", "--now")
    assert (code, "left: quarantine/old names a sample" in out) == (FAILURES, True)


def test_gc_drop_and_compact_say_in_words_what_they_did(run, store):
    assert "rewritten" in run("compact", store, "--dry-run")[1]
    assert run("drop", store, "train")[1].startswith("train: 1 catalog and 1 plan removed")
    assert "would be marked for deletion" in run("gc", store)[1]
    assert "readable for 0 h" in run("gc", store, "--apply", "--grace", "0")[1]
    assert " 0 segments" not in run("gc", store, "--apply", "--grace", "0")[1].splitlines()[0]
    assert list_segments(Layout(store)) == frozenset()
    assert run("drop", store, "train")[0] == ERROR


def test_gc_says_why_nothing_goes(run, store, data):
    for number in range(3):
        (data / "0.txt").write_text(f"another caption {number}")
        (data / "0.png").write_bytes(b"another picture %d" % number)
        assert run("precompute", data, "--model", "model", "--store", store)[0] == OK
    assert re.search(r"^4 generations are kept \(4 of 'train'\): `--keep 1` frees \d", run("gc", store)[1], re.MULTILINE)
    assert run("gc", store, "--keep", "1", "--apply")[0] == OK
    said = run("gc", store)[1]
    assert re.search(r"marked earlier and not removed yet; they can be removed from \d{4}-\d\d-\d\d \d\d:\d\d on$", said, re.MULTILINE)
    assert "generations are kept" not in said
    assert run("gc", store, "--keep", "0")[0] == USAGE


@pytest.mark.parametrize("hours", ["-1", "x", "nan", "inf"])
def test_a_grace_that_is_none_is_refused(run, store, hours):
    assert run("gc", store, f"--grace={hours}")[0] == USAGE


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["verfy", "store"], "verify"),
        (["Precompute"], "precompute"),
        (["verify", "store", "--jsn"], "--json"),
        (["gc", "store", "--aply"], "--apply"),
        (["precompute", "data", "--modle=m"], "--model"),
        (["precompute", "data", "--batch_sizes", "4"], "--batch-size"),
        (["precompute", "data", "--dry-run"], "--plan-only"),
        (["precompute", "data", "--output_dir=cache"], "--store"),
    ],
)
def test_a_misspelt_command_or_option_is_answered_with_the_one_that_was_meant(run, line, meant):
    code, _out, err = run(*line)
    assert code == USAGE
    assert f"; did you mean {meant!r}" in err


def test_import_asks_for_data_by_its_option(run, tmp_path):
    code, _out, said = run("import", "musubi", tmp_path, "--store", tmp_path / "store", "--claim", "model=x")
    assert (code, "--data" in said, "DATA" in said) == (USAGE, True, False)


def test_no_command_is_a_usage_error(run):
    assert run()[0] == USAGE


def test_help_and_the_page_name_every_exit_code(run):
    _code, reported, _err = run("--help")
    page = (fakes.ROOT / "docs" / "exit-codes.md").read_text()
    for code in (OK, ERROR, USAGE, FAILURES, DAMAGE, NO_STORE):
        assert re.search(rf"^  {code} +\S", reported, re.MULTILINE)
        assert f"\n| {code} | " in page
    assert all("130, 143" in text for text in (reported, page))
    assert {command for command in COMMANDS if f"`{command}`" not in page} == set()
    for name in re.search(r"The\s+classes are([^.]*)\.", page)[1].split("`")[1::2]:
        assert issubclass(getattr(errors, name), errors.CacheStoreError)


@pytest.mark.parametrize("options", share([[], ["--quick"], ["--json"]], 3))
def test_what_verify_advises_can_be_pasted(run, tmp_path, makers, data, options):
    store = tmp_path / "a store"
    assert run("precompute", data, "--model", "model", "--store", store)[0] == OK
    for digest in list_segments(Layout(store)):
        path = Layout(store).segment(digest)
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
    (plan,) = Layout(store).plans.iterdir()
    (plan / "plan.safetensors").chmod(0o644)
    (plan / "plan.safetensors").write_bytes(b"x" * 64)
    _code, out, _err = run("verify", store, *options)
    advised = [shlex.split(command) for command in re.findall(r"`(cachestore .*?)`", out)]
    assert {command[1] for command in advised} == {"repair"}
    assert {command[2] for command in advised} == {str(store)}
    assert ["cachestore", "repair", str(store), "--refill"] in advised
    assert run(*max(advised, key=len)[1:])[0] == OK
    assert run("verify", store)[0] == OK


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run, command):
    code, out, _err = run(command, "--help")
    assert code == OK
    assert "usage: cachestore" in out


@pytest.mark.parametrize("command", ON_STORES)
def test_an_error_with_json_is_an_object_on_stdout_too(run, command, tmp_path):
    code, out, err = run(*arguments_of(command, tmp_path / "nothing"), "--json")
    assert code == NO_STORE
    assert json.loads(out)["kind"] == "StoreNotFound"
    assert json.loads(out)["error"] in err


@pytest.mark.parametrize("command", ON_STORES)
def test_every_command_works_on_a_store_of_nothing_but_those_that_name_something(run, command, tmp_path):
    cs.open(tmp_path / "store", mode="a").close()
    names_something = command in {*OF_SOMETHING, "relocate"}
    assert run(*arguments_of(command, tmp_path / "store"))[0] == (ERROR if names_something else OK)


@pytest.mark.parametrize("command", ON_STORES)
def test_every_command_ends_well_on_a_whole_store(run, command, store):
    assert run(*arguments_of(command, store))[0] == OK


def test_damage_is_4_for_verify_and_repair_is_4_only_while_something_is_missing(run, store):
    flip(store)
    assert run("verify", store)[0] == DAMAGE
    code, out, _err = run("repair", store, "--dry-run")
    assert (code, "without --refill 1 would still be missing" in out) == (DAMAGE, True)
    assert run("repair", store)[0] == DAMAGE
    assert run("repair", store, "--refill")[0] == OK
    assert run("verify", store)[0] == OK


def test_a_catalog_that_was_deleted_is_noticed_and_built_again_byte_for_byte(run, run_json, data, store):
    (data / "3.png").write_bytes(b"picture 3")
    os.utime(data / "3.png", (3, 3))
    assert run("precompute", data, "--model", "model", "--store", store)[0] == OK
    path = Layout(store).catalog("train", 2)
    before = path.read_bytes()
    path.unlink()
    code, report = run_json("verify", store, "--quick")
    assert (code, [(finding["kind"], finding["path"]) for finding in report["findings"]]) == (
        DAMAGE,
        [("bad-catalog", "catalogs/train/2.safetensors")],
    )
    assert run_json("repair", store, "--dry-run")[1]["rebuilt"] == ["train"]
    code, repaired = run_json("repair", store)
    assert (code, repaired["rebuilt"]) == (OK, ["train"])
    assert path.read_bytes() == before
    assert run("verify", store)[0] == OK


def test_a_damaged_newest_catalog_is_put_aside_and_built_again(run_json, store):
    path = Layout(store).catalog("train", 1)
    before = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(before[:-20])
    code, repaired = run_json("repair", store)
    assert (code, repaired["rebuilt"]) == (OK, ["train"])
    assert path.read_bytes() == before


def test_a_deleted_catalog_whose_plan_is_gone_too_is_not_guessed_at(run, run_json, data, store):
    layout = Layout(store)
    layout.catalog("train", 1).unlink()
    [plan] = os.listdir(layout.plans)
    layout.plan(plan).unlink()
    code, repaired = run_json("repair", store)
    assert (repaired["rebuilt"], [finding["kind"] for finding in repaired["findings"]]) == ([], ["bad-catalog"])
    assert code == DAMAGE
    assert run("precompute", data, "--model", "model", "--store", store)[0] == OK
    assert run("verify", store)[0] == OK


def test_quick_verify_and_a_part_that_holds_no_damage_do_not_see_a_flipped_byte(run, store):
    flip(store)
    assert run("verify", store, "--quick")[0] == OK
    count = len(list_segments(Layout(store)))
    codes = [run("verify", store, "--subset", f"{part}/{count}")[0] for part in range(1, count + 1)]
    assert sorted(codes) == [OK] * (count - 1) + [DAMAGE]


@pytest.mark.parametrize("subset", ["0/2", "3/2", "x", "1", "1/0", "-1/2"])
def test_a_part_that_is_none_is_refused(run, store, subset):
    assert run("verify", store, f"--subset={subset}")[0] == USAGE


def test_failures_are_3_and_within_the_limit_0(run, data, store):
    (data / "bad.png").write_bytes(b"undecodable")
    arguments = ["precompute", data, "--model", "model", "--store", store]
    code, out, _err = run(*arguments)
    assert code == FAILURES
    assert "failed: bad.png (latents): this is no picture" in out
    assert run(*arguments, "--max-failures", "1")[0] == OK
    assert run(*arguments, "--strict")[0] == ERROR


@pytest.mark.parametrize(
    "option", [["--encode-arg", "x"], ["--rank", "1"], ["--workers", "x"], ["--procs", "2", "--rank", "0", "--world-size", "2"]]
)
def test_a_malformed_option_is_a_usage_error_before_anything_is_looked_at(run, tmp_path, option):
    code, out, err = run("precompute", tmp_path / "gone", "--model", "model", "--store", tmp_path / "s", *option)
    assert (code, out) == (USAGE, "")
    assert err
    assert "gone" not in err
    assert not (tmp_path / "s").exists()


def test_values_that_fail_for_one_reason_share_a_line_that_counts_and_names_their_samples():
    alike = [{"sample": f"{number}.png", "encoder": "latents", "reason": "it was not encoded"} for number in range(7)]
    alone = {"sample": "cat.png", "encoder": "latents", "reason": "too small"}
    first, second = failed_values([*alike[:4], alone, *alike[4:]])
    assert ("7 samples" in first, "'0.png'" in first, "it was not encoded" in first, "'cat.png'" in first) == (True, True, True, False)
    assert ("'cat.png'" in second, "too small" in second, "samples" in second) == (True, True, False)
    assert failed_values([]) == []


def test_a_malformed_option_is_an_object_for_machines(run, tmp_path):
    code, out, _err = run("precompute", tmp_path, "--model", "m", "--store", tmp_path / "s", "--workers", "-1", "--json")
    assert (code, json.loads(out)["kind"]) == (USAGE, "BadInput")


def test_underscores_work_as_hyphens_in_names_and_are_left_alone_in_values(run_json, data, tmp_path, makers):
    arguments = [
        "precompute",
        data,
        "--model",
        "a_b",
        "--store",
        tmp_path / "s",
        "--max_failures=1",
        "--caption_lines",
        "first",
        "--name",
        "my_name",
    ]
    code, report = run_json(*arguments)
    assert (code, report["name"]) == (OK, "my_name")
    assert any('"a_b"' in recipe.read_text() for recipe in (tmp_path / "s" / "recipes").iterdir())


def test_who_reads_our_output_may_go_away(store):
    source = "import sys; from cachestore.cli import main; sys.exit(main(['ls', sys.argv[1]]))"
    process = fakes.program(source, store)
    process.stdout.close()
    process.stdout = None
    _out, err = process.communicate(timeout=50)
    assert err == ""
    assert process.returncode in {0, 120}


# JSON


FINDING = {"kind", "path", "key", "sample", "message", "entries", "is_newer"}


def test_precompute_prints_the_contracts_fields(run_json, data, store):
    (data / "bad.png").write_bytes(b"undecodable")
    code, report = run_json("precompute", data, "--model", "model", "--store", store)
    assert code == FAILURES
    assert {"complete", "samples", "wanted", "reused", "encoded", "failed", "missing", "encoded_here"} <= set(report)
    assert {"seconds", "bytes", "store", "name", "plan", "generation", "failures", "stages"} <= set(report)
    assert report["wanted"] == report["reused"] + report["encoded"] + report["failed"] + report["missing"]
    assert report["failures"] == [{"sample": "bad.png", "encoder": "latents", "reason": "this is no picture"}]
    assert (report["samples"], report["store"], report["name"]) == (4, str(store), "train")


@pytest.mark.parametrize("option", ["--json", "--plan-only"])
def test_an_empty_folder_and_a_manifest_without_captions_are_usage_errors(run_json, tmp_path, makers, option):
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.jsonl").write_text('{"image": "a.png", "captoin": "a cat"}\n')
    for data in (tmp_path / "empty", tmp_path / "m.jsonl"):
        code, reported = run_json("precompute", data, "--model", "m", "--store", tmp_path / "s", option)
        assert (code, reported["kind"], (tmp_path / "s").exists()) == (USAGE, "BadUsage", False)


def test_plan_only_prints_the_contracts_fields_and_encodes_nothing(run_json, data, tmp_path, makers):
    code, forecast = run_json("precompute", data, "--model", "m", "--store", tmp_path / "s", "--plan-only")
    assert code == OK
    assert {"samples", "wanted", "present", "to_encode", "estimated_bytes", "estimated_seconds", "free_bytes"} <= set(forecast)
    assert {"buckets", "truncated_captions"} <= set(forecast)
    assert (forecast["samples"], forecast["wanted"], forecast["present"], forecast["to_encode"]) == (3, 7, 0, 7)
    assert makers.encoded() == []
    assert not (tmp_path / "s").exists()


def test_plan_only_does_not_count_captions_that_another_data_set_has(run_json, data, store, tmp_path):
    (tmp_path / "more").mkdir()
    for n, caption in enumerate(("caption 1", "a new caption")):
        (tmp_path / "more" / f"{n}.png").write_bytes(b"another %d" % n)
        (tmp_path / "more" / f"{n}.txt").write_text(caption)
    _code, forecast = run_json("precompute", tmp_path / "more", "--model", "model", "--store", store, "--name", "more", "--plan-only")
    # Two pictures and a caption: "caption 1" and the empty one are there.
    assert (forecast["wanted"], forecast["present"], forecast["to_encode"]) == (5, 2, 3)
    code, report = run_json("precompute", tmp_path / "more", "--model", "model", "--store", store, "--name", "more")
    assert (code, report["encoded"], report["reused"]) == (OK, 3, 2)


def test_the_summary_says_how_many_samples_are_usable(run, run_json, data, tmp_path, makers):
    (data / "1.png").write_bytes(b"undecodable")
    code, out, _err = run("precompute", data, "--model", "m", "--store", tmp_path / "s")
    assert (code, "3 samples, 2 of them ready to train on; " in out) == (FAILURES, True)
    assert run_json("precompute", data, "--model", "m", "--store", tmp_path / "s")[1]["usable"] == 2
    found = fakes.catalog(tmp_path / "s")
    assert [found.is_complete(row) for row in range(3)] == [True, False, True]


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_the_result_names_the_line_of_a_row_without_a_picture(run, data, tmp_path, makers, quiet):
    rows = [{"image": "0.png", "caption": "x"}, {"imgae": "1.png", "caption": "y"}]
    (data / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _err = run("precompute", data / "m.jsonl", "--model", "m", "--store", tmp_path / "s", *quiet)
    assert code == OK
    assert f"1 sample has no picture ({data / 'm.jsonl'}, line 2 (columns imgae, caption)): batches of such samples hold no latents" in out


def test_quiet_prints_no_lines_of_python(run, data, tmp_path, makers):
    _code, out, err = run("precompute", data, "--model", "m", "--store", tmp_path / "s", "--quiet")
    assert ("CachedDataset" in out, "7 values" in out, "generation" in out, err) == (False, True, True, "")
    _code, out, _err = run("precompute", data, "--model", "m", "--store", tmp_path / "s")
    assert "CachedDataset" in out


def test_where_no_sample_can_be_trained_on_no_lines_of_python_are_printed(run, tmp_path, makers):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bad.png").write_bytes(b"undecodable")
    code, out, _err = run("precompute", tmp_path / "data", "--model", "m", "--store", tmp_path / "s")
    assert (code, "0 of them ready" in out, "CachedDataset" in out) == (FAILURES, True, False)


def test_what_import_starts_for_itself_is_in_no_message(run):
    for arguments in (["--help"], ["nope"]):
        _code, out, err = run(*arguments)
        assert "export" in out + err
        assert not any(name in out + err for name in HIDDEN)


def test_plan_only_looks_into_the_store_that_is_there(run_json, data, store):
    code, forecast = run_json("precompute", data, "--model", "model", "--store", store, "--plan-only")
    assert (code, forecast["present"], forecast["to_encode"]) == (OK, 7, 0)


def test_plan_only_leaves_an_empty_folder_empty_and_refuses_what_holds_something_else(run, data, tmp_path, makers):
    (tmp_path / "s").mkdir()
    assert run("precompute", data, "--model", "m", "--store", tmp_path / "s", "--plan-only")[0] == OK
    assert list((tmp_path / "s").iterdir()) == []
    assert run("precompute", data, "--model", "m", "--store", data, "--plan-only")[0] == ERROR


def test_verify_prints_the_contracts_fields_and_names_key_and_sample(run_json, store):
    code, whole = run_json("verify", store)
    assert (code, whole["ok"], whole["findings"]) == (OK, True, [])
    assert {"ok", "entries", "segments", "bytes", "seconds", "findings"} <= set(whole)
    key = flip(store)
    code, damaged = run_json("verify", store)
    assert (code, damaged["ok"]) == (DAMAGE, False)
    assert all(set(finding) == FINDING for finding in damaged["findings"])
    assert {(finding["key"], finding["sample"]) for finding in damaged["findings"]} == {(key, "1.png")}
    assert [finding["kind"] for finding in damaged["findings"]] == ["corrupt-entry"]
    assert damaged["findings"][0]["entries"] == [{"key": key, "sample": "1.png", "has_copy": False}]


def test_verify_lists_the_entries_of_a_damaged_segment_under_it(run, store):
    key = flip(store)
    lines = run("verify", store)[1].splitlines()
    assert lines[0].startswith("corrupt-entry: ")
    assert lines[1] == f"  entry {key} (sample '1.png'): no other copy"
    assert lines[2].startswith("DAMAGED: ")


def test_verify_says_that_a_store_has_no_index(run, run_json, store):
    for path in Layout(store).indexes.iterdir():
        path.unlink()
    code, out, _err = run("verify", store)
    assert (code, out.startswith("note: there is no index"), "ok: 7 entries" in out) == (OK, True, True)
    assert len(run_json("verify", store)[1]["remarks"]) == 1
    assert "index would be rebuilt" in run("repair", store, "--dry-run")[1]
    assert "index rebuilt" in run("repair", store)[1]
    assert "note: " not in run("verify", store)[1]


def test_repair_prints_the_contracts_fields(run_json, store):
    flip(store)
    code, repaired = run_json("repair", store)
    assert {"salvaged", "quarantined", "rebuilt", "missing", "refilled"} <= set(repaired)
    assert (code, repaired["missing"], repaired["refilled"]) == (DAMAGE, 1, 0)
    code, refilled = run_json("repair", store, "--refill")
    assert (code, refilled["missing"], refilled["refilled"]) == (OK, 0, 1)


def test_ls_prints_the_contracts_fields_in_the_order_of_keys(run, run_json, store):
    code, listed = run_json("ls", store)
    assert code == OK
    assert all({"key", "bytes", "segment", "tensors", "meta"} <= set(entry) for entry in listed["entries"])
    keys = [entry["key"] for entry in listed["entries"]]
    assert keys == sorted(keys)
    assert len(keys) == 7
    assert listed["entries"][0]["tensors"] == {"value": {"dtype": "U8", "shape": [16]}}
    assert {"input_digest", "encoder"} <= set(listed["entries"][0]["meta"])
    assert (store / listed["entries"][0]["segment"]).is_file()
    assert run("ls", store, "--keys")[1].split() == keys


def test_ls_reads_no_header_for_lines_and_each_once_for_json(run, run_json, store, monkeypatch):
    read, asked = reading.read_contents, []
    monkeypatch.setattr(reading, "read_contents", lambda path: asked.append(path) or read(path))
    lines = run("ls", store)[1].splitlines()
    assert asked == []
    entries = run_json("ls", store)[1]["entries"]
    assert [line.split()[0] for line in lines] == [entry["key"] for entry in entries]
    assert sorted(path.name for path in asked) == sorted({entry["segment"].rpartition("/")[2] for entry in entries})


def test_stats_prints_the_contracts_fields(run_json, store):
    code, found = run_json("stats", store)
    assert code == OK
    assert {"entries", "segments", "bytes", "generation", "recipes", "catalogs"} <= set(found)
    assert (found["entries"], len(found["recipes"])) == (7, 2)
    [catalog] = found["catalogs"]
    assert (catalog["name"], catalog["samples"], catalog["complete"]) == ("train", 3, 3)


def test_status_prints_the_contracts_fields(run_json, store):
    code, found = run_json("status", store)
    assert code == OK
    [plan] = found["plans"]
    assert {"plan", "pass", "partitions", "finished", "claimed", "encoded", "failed", "complete", "ranks"} <= set(plan)
    assert {"rank", "host", "pid", "rate", "done", "beat_age_seconds"} <= set(plan["ranks"][0])
    assert (plan["complete"], plan["encoded"], plan["finished"] == plan["partitions"]) == (True, 7, True)


# One sample, one entry


def test_show_finds_an_entry_by_its_key(run, run_json, store):
    key = run("ls", store, "--keys")[1].split()[0]
    code, shown = run_json("show", store, key)
    assert (code, shown["key"]) == (OK, key)
    assert key in run("show", store, key)[1]
    assert run_json("show", store, key.upper())[1]["key"] == key


def test_show_finds_everything_of_a_sample(run, run_json, store):
    code, shown = run_json("show", store, "1.png")
    assert code == OK
    [found] = shown["in"]
    assert found["captions"] == ["caption 1"]
    assert set(found["entries"]) == {"text/caption", "latents/image"}
    assert found["entries"]["latents/image"][0]["meta"]["input_digest"] == fakes.digest_bytes(b"picture 1")
    assert "caption: caption 1" in run("show", store, "1.png")[1]


@pytest.mark.parametrize("what", ["nobody.png", "0" * 32])
def test_show_refuses_what_is_neither(run, store, what):
    code, _out, err = run("show", store, what)
    assert code == ERROR
    assert "neither a key" in err


def test_show_finds_a_sample_whose_id_looks_like_a_key(run_json, tmp_path, makers):
    odd = "ab" * 16
    (tmp_path / "m.jsonl").write_text(json.dumps({"id": odd, "caption": "c"}) + "\n")
    run_json("precompute", tmp_path / "m.jsonl", "--model", "m", "--store", tmp_path / "s")
    assert run_json("show", tmp_path / "s", odd)[1]["in"][0]["captions"] == ["c"]


def test_a_run_that_has_nothing_to_do_starts_no_process(run, run_json, data, makers, monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    arguments = ("precompute", data, "--model", tmp_path / "model", "--store", tmp_path / "store")
    assert run_json(*arguments)[1]["encoded"] == 7
    started = []
    real = launching.run_workers
    monkeypatch.setattr(launching, "run_workers", lambda *some, **named: started.append(some) or real(*some, **named))
    code, found = run_json(*arguments)
    assert (code, found["reused"], found["encoded"], started) == (OK, 7, 0, [])
    assert "7 values, 7 of them in the store already; 0 to encode" in run(*arguments)[2]
    assert started == []
    (data / "1.txt").write_text("another caption")
    assert run_json(*arguments)[1]["encoded"] == len(started) == 1
    assert run_json(*arguments, "--resolution", "512", "--replace")[0] == OK
    assert len(started) == 2, "other options need other values"


def test_why_says_that_a_sample_is_ready(run, run_json, store):
    code, answer = run_json("why", store, "1.png")
    assert (code, answer["in"][0]["ready"]) == (OK, True)
    assert {cell["state"] for cell in answer["in"][0]["cells"]} == {"present"}
    assert "ready" in run("why", store, "1.png")[1]


def test_why_says_why_a_sample_failed(run, run_json, data, store):
    (data / "bad.png").write_bytes(b"undecodable")
    run("precompute", data, "--model", "model", "--store", store)
    code, answer = run_json("why", store, "bad.png")
    cells = {cell["encoder"]: cell for cell in answer["in"][0]["cells"]}
    assert (code, answer["in"][0]["ready"]) == (DAMAGE, False)
    assert (cells["latents"]["state"], cells["latents"]["reason"]) == ("not made", "this is no picture")
    assert cells["text"]["state"] == "present"
    said = run("why", store, "bad.png")[1]
    assert "None" not in said
    assert "0000000000" not in said


def test_why_without_a_sample_lists_all_that_are_not_ready_with_their_reasons(run, run_json, data, store):
    assert run("why", store)[:2] == (OK, "data set 'train' (generation 1): all 3 samples are ready\n")
    (data / "bad.png").write_bytes(b"undecodable")
    run("precompute", data, "--model", "model", "--store", store)
    flip(store)
    run("repair", store)
    code, found = run_json("why", store)
    cells = {one["sample"]: [(cell["encoder"], cell["state"]) for cell in one["cells"]] for one in found["not_ready"]}
    assert (code, cells) == (DAMAGE, {"1.png": [("latents", "missing")], "bad.png": [("latents", "not made")]})
    lines = run("why", store)[1].splitlines()
    assert lines[0].startswith("train  1.png: latents/image at 1024 missing: its entry has no valid copy")
    assert lines[1] == "train  bad.png: latents/image at 1024 not made: this is no picture"
    assert lines[2] == "data set 'train' (generation 2): 2 of 4 samples are not ready"


def test_why_takes_the_data_sets_name(run, run_json, data, store):
    run("precompute", data, "--model", "model", "--store", store, "--name", "other")
    assert [one["name"] for one in run_json("why", store, "1.png")[1]["in"]] == ["other", "train"]
    assert [one["name"] for one in run_json("why", store, "1.png", "--name", "other")[1]["in"]] == ["other"]
    assert run("why", store, "--name", "other")[1].count("data set") == 1


def test_ls_lists_samples_with_captions_buckets_and_whether_they_are_ready(run, run_json, data, store):
    (data / "bad.png").write_bytes(b"undecodable")
    run("precompute", data, "--model", "model", "--store", store)
    code, listed = run_json("ls", store, "--samples")
    assert (code, [(one["id"], one["ready"]) for one in listed["samples"]]) == (
        OK,
        [("0.png", True), ("1.png", True), ("2.png", True), ("bad.png", False)],
    )
    assert listed["samples"][0] == {"name": "train", "id": "0.png", "captions": ["caption 0"], "buckets": ["4x4"]} | {
        "fits": [{"scale": 1.0, "cut": 0.0}],
        "ready": True,
    }
    assert (listed["samples"][3]["buckets"], listed["samples"][3]["fits"]) == ([], [])
    lines = run("ls", store, "--samples", "--name", "train")[1].splitlines()
    assert (lines[0], lines[3]) == ("train  0.png  4x4  scaled 1.00 times, 0% cut off  ready  caption 0", "train  bad.png  -  NOT READY  ")


def test_a_name_may_stand_between_store_and_sample(run, store):
    assert run("show", store, "--name", "train", "0.png")[:2] == run("show", store, "0.png", "--name", "train")[:2]
    assert run("why", store, "--json", "0.png")[0] == OK


def test_ls_says_that_a_sample_whose_entry_is_gone_is_not_ready(run_json, store):
    flip(store)
    run_json("repair", store)
    assert [one["ready"] for one in run_json("ls", store, "--samples")[1]["samples"]] == [True, False, True]


def test_why_says_that_an_entry_was_lost(run_json, store):
    key = flip(store)
    run_json("repair", store)
    code, answer = run_json("why", store, "1.png")
    cell = next(cell for cell in answer["in"][0]["cells"] if cell["key"] == key)
    assert (code, cell["state"]) == (DAMAGE, "missing")
    assert "--refill" in cell["reason"]


def test_why_gives_the_newest_reason(run, run_json, data, store):
    """The sample failed in earlier plans too, for other reasons."""
    for n in range(6):
        (data / "bad.png").unlink(missing_ok=True)
        if n % 2:
            (data / "bad.png").write_bytes(b"undecodable")
        else:
            (data / "bad.png").symlink_to("gone")
        (data / f"new {n}.png").write_bytes(b"another")
        run("precompute", data, "--model", "model", "--store", store)
        _code, answer = run_json("why", store, "bad.png")
        cell = next(cell for cell in answer["in"][0]["cells"] if cell["encoder"] == "latents")
        assert ("this is no picture" if n % 2 else "No such file") in cell["reason"]


@pytest.fixture
def repeated(tmp_path, makers):
    """A store with a sample of which two of three captions are equal, and one in a folder."""
    rows = [{"id": "p05.png", "caption": ["a", "a", "b"]}, {"id": "photos/P06.JPG", "caption": ["c", "d"]}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cs.precompute(tmp_path / "m.jsonl", model="m", store=tmp_path / "s", captions="all", inline=True).complete
    return tmp_path / "s"


@pytest.mark.parametrize("command", ["show", "why"])
def test_what_equal_captions_share_is_reported_once_with_how_many_they_are(run, run_json, repeated, command):
    _code, out, _err = run(command, repeated, "p05.png")
    entries = run_json("show", repeated, "p05.png")[1]["in"][0]["entries"]
    shared, same, other = [entry["key"] for entry in entries["text/caption"]]
    assert (shared == same, out.count(shared), out.count(other)) == (True, 1, 1)
    assert out.count("text/caption (2 captions share it):") == 1
    assert out.count("text/caption:") == 1
    assert ("caption: a (2 times)\n" in out) == (command == "show")


def test_for_machines_there_is_a_cell_for_each_caption(run_json, repeated):
    assert len(run_json("why", repeated, "p05.png")[1]["in"][0]["cells"]) == 3
    assert len(run_json("show", repeated, "p05.png")[1]["in"][0]["captions"]) == 3


@pytest.mark.parametrize("command", ["show", "why"])
@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("photos/p05.png", "p05.png"),
        ("p05.jpg", "p05.png"),
        ("p05", "p05.png"),
        ("P05.PNG", "p05.png"),
        ("p06.jpg", "photos/P06.JPG"),
        ("po5.png", "p05.png"),
    ],
)
def test_an_id_that_is_nearly_one_is_answered_with_the_one_that_is(run, repeated, command, asked, meant):
    code, _out, err = run(command, repeated, asked)
    assert code == ERROR
    assert f"; did you mean {meant!r}" in err


def test_the_nearest_of_many_ids_come_first_and_three_at_most():
    ids = [f"{folder}/img_{n:05}.png" for folder in ("a", "b", "c", "d") for n in range(3000)]
    assert near_to("c/img_02999.jpg", [ids[:5000], ids[5000:]]).startswith("; did you mean 'c/img_02999.png', ")
    assert near_to("img_02999.jpg", [ids]).count(".png") == 3
    assert "img_02999.png" in near_to("imq_02999.png", [ids])
    assert near_to("something else", [ids]) == near_to("x", []) == near_to("", [ids]) == ""


def test_why_refuses_a_sample_that_nobody_lists(run, store):
    code, _out, err = run("why", store, "nobody.png")
    assert code == ERROR
    assert "nobody.png" in err


def test_a_sample_may_be_named_as_the_disk_spells_it(run_json, tmp_path, makers):
    import unicodedata

    decomposed = unicodedata.normalize("NFD", "é.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / decomposed).write_bytes(b"x")
    run_json("precompute", tmp_path / "data", "--model", "m", "--store", tmp_path / "s")
    for command in ("show", "why"):
        assert run_json(command, tmp_path / "s", decomposed)[0] == OK


# Terminals


ESCAPE = "\x1b[31mred\x07"


def test_printable_leaves_words_of_any_script_alone():
    assert printable("plain, ünïcöde, 写真 \U0001f600") == "plain, ünïcöde, 写真 \U0001f600"


@pytest.mark.parametrize("text", [ESCAPE, "\x9b31m", "\u202eright to left", "\r", "\ud800", "\x7f"])
def test_what_a_terminal_would_obey_is_escaped(text):
    assert printable(text).isascii()
    assert printable(text) != text


@pytest.fixture
def hostile(tmp_path, makers, run):
    """A store in which every name and text that a user brings tries to speak to the terminal."""
    data = tmp_path / f"data {ESCAPE}"
    data.mkdir()
    rows = [
        {"id": f"sample {ESCAPE}", "caption": f"caption {ESCAPE}", "image": f"{ESCAPE}.png"},
        {"id": f"bad {ESCAPE}", "image": f"gone {ESCAPE}.png", "caption": "c"},
        {"id": "fine", "caption": "f"},
    ]
    (data / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / f"{ESCAPE}.png").write_bytes(b"picture")
    store = tmp_path / f"store {ESCAPE}"
    arguments = ["precompute", data / "m.jsonl", "--model", f"model {ESCAPE}", "--store", store, "--name", f"name {ESCAPE}"]
    return store, arguments


def test_no_command_hands_an_escape_to_the_terminal(run, hostile):
    store, arguments = hostile
    printed = [run(*arguments), run(*arguments, "--plan-only")]
    assert printed[0][0] == FAILURES
    printed += [run(command, store) for command in ("status", "verify", "stats", "ls", "repair")]
    printed += [run(command, store, f"sample {ESCAPE}") for command in ("show", "why")]
    printed += [run(command, store, f"bad {ESCAPE}") for command in ("show", "why")]
    printed += [run("why", store, f"nobody {ESCAPE}"), run("ls", f"{store}{ESCAPE}"), run("precompute", f"gone{ESCAPE}", *arguments[2:])]
    for digest in list_segments(Layout(store)):
        Layout(store).segment(digest).unlink()
    printed += [run("verify", store), run("repair", store)]
    lines = [line for _code, out, err in printed for line in (out + err).split("\n")]
    assert any("\\x1b" in line for line in lines)
    assert [line for line in lines if not line.isprintable()] == []


def test_json_carries_the_names_as_they_are(run_json, hostile):
    store, arguments = hostile
    _code, report = run_json(*arguments)
    assert report["name"] == f"name {ESCAPE}"
    assert report["failures"][0]["sample"] == f"bad {ESCAPE}"
    assert report["store"] == str(store)


# What is loaded


LOADED = """
import json, sys
from cachestore.cli import main
from cachestore.jobs.start import launching
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
print(codes, sorted({"torch", "transformers", "diffusers", "PIL"} & set(sys.modules)), file=sys.stderr)
"""


def test_looking_at_a_store_never_imports_torch(store):
    commands = [list(map(str, arguments_of(command, store))) for command in ON_STORES]
    _out, err = fakes.program(LOADED, json.dumps([*commands, ["verify", str(store), "--quick"]])).communicate(timeout=50)
    assert err == f"{[OK] * (len(ON_STORES) + 1)} []\n"


# Pictures and reports


def test_report_writes_one_page_and_says_where(run, run_json, store, tmp_path):
    code, out, _err = run("report", store, "-o", tmp_path / "a" / "page.html")
    assert (code, out.startswith(f"{tmp_path / 'a' / 'page.html'}: data set 'train', 3 samples, 7 entries")) == (OK, True)
    assert re.search(r"; the page has \d+(\.\d)? Ki?B$", out.strip())
    code, reported = run_json("report", store, "-o", tmp_path / "a" / "page.html", "--name", "train", "--batch_size", "2")
    assert (code, reported["samples"], reported["batch_size"]) == (OK, 3, 2)
    assert reported["page_bytes"] == (tmp_path / "a" / "page.html").stat().st_size


@pytest.mark.parametrize("command", ["report", "show", "precompute"])
def test_what_is_written_somewhere_new_makes_its_folders_and_the_help_says_so(run, tmp_path, makers, data, command):
    path = stores.make_store(tmp_path / "latents", [stores.Row("a")], stores.recipes())
    new = tmp_path / "some" / "new" / "place"
    arguments = {
        "report": ["report", path, "-o", new],
        "show": ["show", path, "a", "--png", new],
        "precompute": ["precompute", data, "--model", "m", "--store", new],
    }
    code, out, err = run(*arguments[command])
    assert (code, str(new) in out, new.exists()) == (OK, True, True), err
    assert "made if it does not exist" in " ".join(run(command, "--help")[1].split())


def test_report_shows_damage_and_leaves_the_exit_code_to_verify(run, run_json, store, tmp_path):
    flip(store)
    code, reported = run_json("report", store, "-o", tmp_path / "page.html", "--full")
    assert (code, reported["damage"]["ok"]) == (OK, False)
    assert run("verify", store)[0] == DAMAGE


@pytest.mark.parametrize("size", ["0", "-1", "x", "1.5"])
def test_a_batch_size_that_is_none_is_a_usage_error(run, store, size):
    assert run("report", store, f"--batch-size={size}")[0] == USAGE


def test_show_writes_a_samples_latents_as_a_picture(run, run_json, tmp_path):
    path = stores.make_store(tmp_path / "latents", [stores.Row("a"), stores.Row("b", bucket=None)], stores.recipes())
    code, out, _err = run("show", path, "a", "--png", tmp_path / "a.png")
    assert (code, f"{tmp_path / 'a.png'}: 8x6 pixels. Grey" in out) == (OK, True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run_json("show", path, "a", "--png", tmp_path / "a.png")[1]["png"]["size"] == [8, 6]
    assert run("show", path, "b", "--png", tmp_path / "b.png")[0] == ERROR
    assert run("show", path, "a", "--source", tmp_path)[0] == ERROR
    assert not (tmp_path / "b.png").exists()


def test_the_version_is_that_of_the_package(run):
    assert run("--version")[:2] == (OK, f"cachestore {cs.__version__}\n")
