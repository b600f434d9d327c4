"""Names: what is made is parsed back, and what was not made by us is nobody's."""

import shlex
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.files import paths
from cachestore.files.paths import PARTITION_LIMIT, AttemptName, ClaimName, IndexName, Layout, LedgerName, Mode, PassFolder

LAYOUT = Layout(Path("/store"))
PASS = PassFolder(Path("/store/plans/p/0"))

numbers = st.integers(0, 10**18 - 1)
hex_of = "0123456789abcdef"
digests = st.text(hex_of, min_size=32, max_size=32)
spans = st.tuples(st.integers(0, PARTITION_LIMIT - 1), st.integers(0, PARTITION_LIMIT - 1)).map(sorted)
claims = st.builds(lambda number, recipe, span, n: ClaimName(number, recipe, span[0], span[1], n), numbers, numbers, spans, numbers)
ledgers = st.builds(lambda number, recipe, span: LedgerName(number, recipe, span[0], span[1]), numbers, numbers, spans)

MADE_AND_PARSED = {
    "segment": (digests, lambda digest: LAYOUT.segment(digest).name, paths.parse_segment),
    "index": (st.builds(IndexName, numbers, digests), lambda name: LAYOUT.index(name).name, paths.parse_index),
    "catalog": (numbers, lambda number: LAYOUT.catalog("train", number).name, paths.parse_catalog),
    "round": (numbers, lambda number: PASS.round(number).name, paths.parse_round),
    "claim": (claims, lambda name: PASS.claim(name).name, paths.parse_claim),
    "ledger": (ledgers, lambda name: PASS.ledger(name).name, paths.parse_ledger),
    "attempt": (st.builds(AttemptName, digests, numbers, numbers), lambda name: PASS.attempt(name).name, paths.parse_attempt),
    "pass": (numbers, lambda number: LAYOUT.pass_folder("0" * 32, number).name, paths.parse_pass),
    "plan": (digests, lambda digest: LAYOUT.plan_folder(digest).name, paths.parse_plan),
    "recipe": (st.text(hex_of, min_size=64, max_size=64), lambda digest: LAYOUT.recipe(digest).name, paths.parse_recipe),
    "lost": (digests, lambda digest: LAYOUT.lost_list(digest).name, paths.parse_lost),
    "worker": (digests, lambda worker: LAYOUT.worker(worker).name, paths.parse_worker),
}


@pytest.mark.parametrize("kind", MADE_AND_PARSED)
@given(data=st.data())
def test_a_made_name_parses_to_what_it_was_made_from(kind, data):
    values, make, parse = MADE_AND_PARSED[kind]
    value = data.draw(values)
    assert parse(make(value)) == value


def test_a_range_that_no_plan_has_is_no_name():
    """A name is expanded into its partitions, so nobody may make a listing long."""
    assert paths.parse_claim("0.0.0-4095.0") == ClaimName(0, 0, 0, 4095, 0)
    assert [paths.parse_claim(f"0.0.{span}.0") for span in ("0-4096", "1-0", "0-99999999999")] == [None] * 3
    assert [paths.parse_ledger(f"0.0.{span}.json") for span in ("0-4096", "1-0", "0-99999999999")] == [None] * 3


FOREIGN = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    ".DS_Store",
    "a.safetensors",
    "01.json",
    "-1.safetensors",
    "1.safetensors\n",
    "1e3.safetensors",
    "²",
    "\u0661",
    f"{'0' * 31}.safetensors",
    f"{'A' * 32}.safetensors",
    f"{'0' * 32}.safetensors.part",
    f"{'0' * 32}.tmp.bak",
    f"1-{'0' * 31}.lmdb",
    f"01-{'0' * 32}.lmdb",
    f"1-{'0' * 32}.lmdb-lock",
    f"{'1' * 19}-{'0' * 32}.lmdb",
    "1.2.3.4.5",
    f"{'0' * 32}.1",
    f"copy of {'0' * 32}.lost.json",
    f"{'0' * 32}.01.2",
    f"{'0' * 31}.1.2",
    "1.2.3.04",
    "1.2..json",
    "\udcff",
]


@pytest.mark.parametrize("kind", MADE_AND_PARSED)
def test_a_foreign_name_parses_to_nothing(kind):
    parse = MADE_AND_PARSED[kind][2]
    assert [name for name in FOREIGN if parse(name) is not None] == []


@pytest.mark.parametrize("kind", MADE_AND_PARSED)
@given(name=st.text())
def test_whatever_parses_would_be_made_the_same_again(kind, name):
    _values, make, parse = MADE_AND_PARSED[kind]
    value = parse(name)
    assert value is None or make(value) == name


def test_temporary_names_are_recognised_and_never_made_twice():
    made = {LAYOUT.new_temporary().name for _ in range(100)}
    assert len(made) == 100
    assert all(paths.is_temporary(name) for name in made)
    assert not any(paths.is_temporary(name) for name in FOREIGN)


def test_index_names_sort_by_number_then_by_digest():
    assert max(IndexName(9, "f"), IndexName(10, "a"), IndexName(10, "b")) == IndexName(10, "b")


@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=16).filter(str.strip))
def test_a_data_sets_name_comes_back_from_its_folder(name):
    assert paths.decode_name(paths.encode_name(name)) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize("name", ["train", "käse 猫", "..", ".hidden", "a/b\\c", "a%2Fb", "x y", "con:1", "e\u0301", "\0", "🦊" * 12])
def test_a_data_sets_folder_is_one_plain_name(name):
    folder = paths.encode_name(name)
    assert "/" not in folder
    assert not folder.startswith(".")
    assert folder.isascii()
    assert folder.isprintable()
    assert paths.decode_name(folder) == unicodedata.normalize("NFC", name)


def test_two_spellings_of_one_text_are_one_data_set():
    assert paths.encode_name("e\u0301") == paths.encode_name("\xe9")


@pytest.mark.parametrize("name", ["", " ", "   ", "x" * 201, "猫" * 30, "\udcff", "a\ud800"])
def test_a_name_that_cannot_be_a_folder_is_refused(name):
    with pytest.raises(BadInput):
        paths.encode_name(name)


@pytest.mark.parametrize("folder", ["", ".git", "a%2fb", "a%2Fb%", "%FF", "%41", "e\u0301", "\udcff", "a\nb"])
def test_a_folder_that_we_would_not_name_so_is_nobodys(folder):
    assert paths.decode_name(folder) is None


@given(folder=st.text())
def test_decoding_any_folder_name_raises_nothing(folder):
    name = paths.decode_name(folder)
    assert name is None or paths.encode_name(name) == folder


OWN_FOLDERS = ["segments", "catalogs/train", "listings/train", "plans", f"plans/{'0' * 32}/1/claims", "tmp"]
NOT_OWN = ["x", "catalogs/.git", "listings/a%2fb", "plans/readme", f"plans/{'0' * 32}/01", f"plans/{'0' * 32}/1/x", "tmp/x", "index/x"]


@pytest.mark.parametrize(("folders", "expected"), [(OWN_FOLDERS, True), (NOT_OWN, False)])
def test_a_folder_of_the_tree_is_told_from_a_strangers(folders, expected):
    assert {folder: paths.is_own_folder(folder) for folder in folders} == dict.fromkeys(folders, expected)


def test_a_file_of_the_tree_is_told_from_a_strangers():
    assert all(paths.is_own_file(str(path.relative_to(LAYOUT.root))) for path in FILES.values())
    strange = ["x", "segments/x", f"segments/00/{'0' * 31}.safetensors", "recipes/x.json", "workers/x.lock", "catalogs/a/01.safetensors"]
    assert not any(map(paths.is_own_file, strange))


def test_the_folders_of_a_store_are_those_of_the_table():
    folders = [
        "segments",
        "index",
        "catalogs",
        "listings",
        "recipes",
        "plans",
        "workers",
        "digests",
        "marked",
        "locks",
        "quarantine",
        "tmp",
    ]
    assert sorted(paths.FOLDERS) == sorted(folders)


def test_every_path_stays_inside_the_store():
    made = [
        LAYOUT.marker,
        LAYOUT.segment("0" * 32),
        LAYOUT.catalog("../../x", 1),
        LAYOUT.recipe("0" * 64),
        LAYOUT.plan("0" * 32),
        LAYOUT.worker_lock("0" * 32),
        LAYOUT.lock("commit"),
        LAYOUT.new_temporary(),
        LAYOUT.digests,
        LAYOUT.quarantine,
        LAYOUT.index(IndexName(0, "0" * 32)),
    ]
    assert all(path.is_relative_to(LAYOUT.root) and ".." not in path.parts for path in made)
    assert PASS.done.parent == PASS.root


@pytest.mark.parametrize(("mode", "folder_bits", "file_bits"), [(Mode.PRIVATE, 0o755, 0o644), (Mode.GROUP, 0o2775, 0o664)])
def test_the_mode_of_a_store_decides_the_permission_bits(mode, folder_bits, file_bits):
    assert (mode.folder_bits, mode.file_bits) == (folder_bits, file_bits)


# Commands to paste


OF_PASS = PassFolder(LAYOUT.pass_folder("0" * 32, 1))
FILES = {
    "marker": LAYOUT.marker,
    "segment": LAYOUT.segment("0" * 32),
    "index": LAYOUT.index(IndexName(3, "0" * 32)),
    "catalog": LAYOUT.catalog("train", 1),
    "catalog under a confusing name": LAYOUT.catalog("index", 1),
    "dropped": LAYOUT.dropped("tmp", 1),
    "recipe": LAYOUT.recipe("0" * 64),
    "plan": LAYOUT.plan("0" * 32),
    "done": OF_PASS.done,
    "ledger": OF_PASS.ledger(LedgerName(0, 1, 2, 3)),
    "claim": OF_PASS.claim(ClaimName(0, 1, 2, 3, 4)),
    "round": OF_PASS.round(0),
    "worker": LAYOUT.worker("0" * 32),
    "marked": LAYOUT.marked_list("0" * 32),
    "lost": LAYOUT.lost_list("0" * 32),
    "lock": LAYOUT.lock("commit"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("root", ["/", "/a store", "/tmp/it's", "/data/index/segments", "/plans/tmp"])
def test_a_command_for_a_file_names_the_store_that_the_file_lies_in(kind, root):
    path = Path(root) / FILES[kind].relative_to(LAYOUT.root)
    assert shlex.split(paths.to_repair(path).strip("`")) == ["cachestore", "repair", root]
    assert paths.to_repair(path) == Layout(Path(root)).command("repair")


def test_a_command_for_a_file_of_no_store_names_none():
    assert paths.to_verify(Path("/somewhere/a.safetensors")) == "`cachestore verify`"


def test_a_commands_options_stand_behind_the_store():
    assert Layout(Path("/s")).command("repair --refill") == "`cachestore repair /s --refill`"
