"""Segments: what is built is parsed back, opens in the stock library, and hides no damage."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Key, key
from cachestore.files.checksum import digest_of
from cachestore.files.container import ALIGNMENT, TensorInfo, build_header, parse_header
from cachestore.store.format import segment
from cachestore.store.format.entry import checksum_of, make_entry, text_of
from cachestore.store.format.segment import SegmentDraft, draft_of, parse_contents, read_contents
from tests.store.stores import entry_of, key_of, tensors_of

HERE = Path("segments/ab/ab.safetensors")


def whole(chunks):
    return b"".join(bytes(chunk) for chunk in chunks)


def build_segment(entries_of_it, **options):
    built = draft_of(entries_of_it).build(**options)
    return built.digest, built.chunks


def parse(raw):
    length = int.from_bytes(raw[:8], "little")
    return parse_contents(parse_header(raw[8 : 8 + length], len(raw), where=HERE), len(raw), where=HERE)


@st.composite
def entries(draw):
    texts = st.text(st.characters(exclude_categories=[]), max_size=5)
    shapes = st.dictionaries(
        st.sampled_from("abcde"), st.tuples(st.sampled_from(["F64", "F32", "BF16", "U8", "BOOL"]), st.integers(0, 20)), max_size=4
    )
    made = []
    for n in range(draw(st.integers(0, 6))):
        tensors = {}
        for name, (dtype, count) in draw(shapes).items():
            width = {"F64": 8, "F32": 4, "BF16": 2}.get(dtype, 1)
            tensors[name] = (dtype, (count,), bytes([n]) * (count * width))
        made.append(make_entry(key(str(n)), tensors, draw(st.dictionaries(texts, texts, max_size=2))))
    return made


def test_a_segment_without_entries_is_valid():
    digest, chunks = build_segment([])
    contents = parse(whole(chunks))
    assert (list(contents.entries), contents.origin) == ([], "")
    assert digest == digest_of(chunks)


@given(given_entries=entries(), origin=st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
def test_entries_come_back_with_their_bytes(given_entries, origin):
    _digest, chunks = build_segment(given_entries, origin=origin)
    raw = whole(chunks)
    contents = parse(raw)
    assert (contents.origin, contents.size_bytes) == (origin, len(raw))
    found = {
        entry.key: (entry.specs, raw[entry.offset : entry.offset + entry.size_bytes], entry.checksum, text_of(entry.meta))
        for entry in contents.entries
    }
    assert found == {entry.key: (entry.specs, b"".join(entry.buffers), entry.checksum, entry.meta) for entry in given_entries}
    assert [entry.ordinal for entry in contents.entries] == list(range(len(given_entries)))
    assert [entry.offset for entry in contents.entries] == sorted(entry.offset for entry in contents.entries)


@given(given_entries=entries())
def test_every_entry_with_bytes_starts_at_a_multiple_of_64(given_entries):
    contents = parse(whole(build_segment(given_entries)[1]))
    assert all(entry.offset % ALIGNMENT == 0 for entry in contents.entries if entry.size_bytes)


@given(given_entries=entries())
def test_the_stock_library_reads_every_tensor(given_entries):
    raw = whole(build_segment(given_entries)[1])
    found = {name: bytes(each["data"]) for name, each in safetensors.deserialize(raw) if not name.startswith("filler/")}
    expected = {
        f"{entry.key}/{spec.name}": bytes(buffer)
        for entry in given_entries
        for spec, buffer in zip(entry.specs, entry.buffers, strict=True)
    }
    assert found == expected


@given(given_entries=entries())
def test_equal_entries_make_equal_segments_and_another_origin_makes_another(given_entries):
    assert build_segment(given_entries)[0] == build_segment(given_entries)[0] != build_segment(given_entries, origin="p/0")[0]


def test_many_entries_with_gaps_have_fillers_of_their_own():
    raw = whole(build_segment([entry_of(n) for n in range(300)])[1])
    fillers = [name for name, _each in safetensors.deserialize(raw) if name.startswith("filler/")]
    assert len(fillers) == len(set(fillers)) == 299
    assert len(parse(raw).entries) == 300


def test_fillers_hold_zeros():
    raw = whole(build_segment([entry_of(n) for n in range(3)])[1])
    assert all(not any(each["data"]) for name, each in safetensors.deserialize(raw) if name.startswith("filler/"))


def test_a_key_given_twice_is_not_written_as_if_it_were_two():
    with pytest.raises(FormatError):
        build_segment([entry_of(1), entry_of(1)])


@given(given_entries=entries(), origin=st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
def test_what_is_built_says_what_readers_will_find(given_entries, origin):
    built = draft_of(given_entries).build(origin=origin)
    assert built.contents == parse(whole(built.chunks))
    assert built.digest == digest_of(built.chunks)


@pytest.mark.parametrize("empty", [{}, {"none": ("U8", (0,), b"")}], ids=["no tensors", "an empty tensor"])
@given(order=st.permutations(range(5)), with_bytes=st.sets(st.integers(0, 4)))
def test_entries_without_bytes_are_where_readers_will_find_them(order, with_bytes, empty):
    given_entries = [entry_of(n) if n in with_bytes else make_entry(key_of(n), empty, {}) for n in order]
    built = draft_of(given_entries).build()
    assert built.contents == parse(whole(built.chunks))


def test_entries_go_on_in_another_block_where_one_is_full(monkeypatch):
    monkeypatch.setattr(segment, "BLOCK_BYTES", 128)
    given_entries = [make_entry(key(str(n)), {"x": ("U8", (n,), bytes([n % 251]) * n)}, {}) for n in (50, 60, 128, 1, 300, 64)]
    digest, chunks = build_segment(given_entries)
    assert len(chunks) > 3
    raw = whole(chunks)
    assert digest == digest_of([raw])
    assert [raw[entry.offset : entry.offset + entry.size_bytes] for entry in parse(raw).entries] == [
        b"".join(e.buffers) for e in given_entries
    ]


@given(given_entries=entries(), ways=st.lists(st.sampled_from([SegmentDraft.add, SegmentDraft.hold]), min_size=6, max_size=6))
def test_held_entries_make_the_segment_that_copied_ones_make(given_entries, ways):
    draft = SegmentDraft()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "HELD_BYTES", 40)
        for entry, add in zip(given_entries, ways, strict=False):
            add(draft, entry)
    built, copied = draft.build(), draft_of(given_entries).build()
    assert (built.digest, built.contents, whole(built.chunks)) == (copied.digest, copied.contents, whole(copied.chunks))


def test_large_buffers_are_held_until_the_draft_is_released_and_small_ones_are_copied():
    large, small = bytearray(segment.HELD_BYTES), bytearray(segment.HELD_BYTES - 1)
    draft = SegmentDraft()
    entry = make_entry(key_of(1), {"a": ("U8", (len(large),), large), "b": ("U8", (len(small),), small)}, {})
    draft.hold(entry)
    large[0] = small[0] = 1
    _header, first, second = draft.build().chunks
    assert (first[0], second[0]) == (1, 0)
    del entry, first, second, _header
    draft.release()
    large.append(0)  # a buffer that is held cannot grow


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on json does not count by the limit that this test sets")
def test_a_value_that_is_nested_too_deeply_to_be_read_is_not_written():
    value = []
    for _level in range(450):
        value = [value]
    limit = sys.getrecursionlimit()
    draft = draft_of([make_entry(key("a"), {}, {"x": value})])
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        with pytest.raises(FormatError):
            draft.build()
    finally:
        sys.setrecursionlimit(limit)


def test_a_value_that_is_not_unicode_leaves_the_segment_readable_for_the_stock_library():
    meta = {"caption": "caf\udce9"}
    raw = whole(build_segment([make_entry(key("a"), {"x": ("U8", (1,), b"1")}, meta)])[1])
    assert [name for name, _each in safetensors.deserialize(raw)] == [f"{key('a')}/x"]
    assert parse(raw).entries.metas == (meta,)


def test_a_segment_is_read_from_a_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(whole(build_segment([entry_of(1), entry_of(2)], origin="p/0")[1]))
    contents = read_contents(path)
    assert {entry.key for entry in contents.entries} == {key_of(1), key_of(2)}
    assert contents.size_bytes == path.stat().st_size


def test_a_missing_segment_is_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_contents(tmp_path / "f")


def is_as_published(raw, digest, entries):
    """What verify asks of a segment's bytes: the digest in its name, or else each entry's checksum."""
    contents = parse(raw)
    intact = all(
        checksum_of(each.key, each.specs, [raw[each.offset : each.offset + each.size_bytes]]) == each.checksum for each in contents.entries
    )
    return digest_of([raw]) == digest, intact and {each.key for each in contents.entries} == {each.key for each in entries}


def test_every_flipped_byte_is_detected_and_no_wrong_value_passes():
    given_entries = [entry_of(1), entry_of(2), make_entry(key_of(3), {}, {"note": "é"})]
    digest, chunks = build_segment(given_entries)
    raw = whole(chunks)
    values = {entry.key: b"".join(entry.buffers) for entry in given_entries}
    for at in range(len(raw)):
        for mask in (1, 0x20, 0xFF):
            flipped = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
            try:
                is_whole, is_intact = is_as_published(flipped, digest, given_entries)
            except FormatError:
                continue
            assert not is_whole
            if is_intact:
                found = {each.key: flipped[each.offset : each.offset + each.size_bytes] for each in parse(flipped).entries}
                assert found == values


def forged(table, tensors=None, *, text=None, **metadata):
    """A segment made by somebody who knows the checksums."""
    text = text if text is not None else json.dumps(table)
    fields = {"format": "cachestore-segment/1", "origin": "", "entries": text, "entries_checksum": digest_of([text.encode()])} | metadata
    infos = tensors or {}
    return build_header(infos, fields) + bytes(max((info.end for info in infos.values()), default=0))


K = str(key("a"))
ROW = ["00" * 16, {}]
ONE = {f"{K}/x": TensorInfo("U8", (1,), 0, 1)}
FORGED = {
    "no table": forged(None, text=""),
    "a table that is not JSON": forged(None, text="{"),
    "a table that is a list": forged([]),
    "a table that is null": forged(None),
    "a table that is a number": forged(1),
    "a deep table": forged(None, text='{"' + K + '":' + "[" * 100_000),
    "another checksum": forged({}, entries_checksum="0" * 32),
    "a key that is no key": forged({"x": ROW}, {"x/x": TensorInfo("U8", (1,), 0, 1)}),
    "a key as a path": forged({"../../etc/x": ROW}),
    "a row that is null": forged({K: None}, ONE),
    "a row without a value": forged({K: ["00" * 16]}, ONE),
    "a checksum that is no hex": forged({K: ["zz", {}]}, ONE),
    "a short checksum": forged({K: ["00", {}]}, ONE),
    "a value that is a list": forged({K: ["00" * 16, []]}, ONE),
    "a value that is a text": forged({K: ["00" * 16, "x"]}, ONE),
    "a tensor without an entry": forged({}, ONE),
    "a tensor without an owner": forged({K: ROW}, {"x": TensorInfo("U8", (1,), 0, 1)}),
    "another format": forged({}, format="pt"),
    "no version": forged({}, format="cachestore-segment"),
    "a version that is no number": forged({}, format="cachestore-segment/²"),
    "no metadata": build_header({}, {}),
}


def test_the_file_that_the_forged_ones_vary_is_good():
    assert [entry.key for entry in parse(forged({K: ROW}, ONE)).entries] == [Key.parse(K)]


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_segment_is_a_format_error(what):
    with pytest.raises(FormatError):
        parse(FORGED[what])


@given(
    table=st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([K, "x"]), inner, max_size=2),
    )
)
def test_any_table_is_an_entry_table_or_a_format_error(table):
    try:
        parse(forged(table, ONE))
    except FormatError:
        return


def test_a_newer_segment_is_refused_with_the_way_out():
    with pytest.raises(NewerFormat):
        parse(forged({}, format="cachestore-segment/2"))


def test_the_tensors_of_the_arranged_entries_cover_what_matters():
    assert {0} < {len(raw) for _dtype, _shape, raw in tensors_of(1).values()}
