"""What a look at a file gives, or what is wrong with the file."""

from functools import partial

import pytest

from cachestore.core.errors import FormatError, ReadFailed
from cachestore.store.format.findings import DamagedEntry, Finding, missing_keys, one_each, read_or_finding


def test_a_message_joins_what_is_wrong_and_what_to_do_and_json_has_it_alone():
    finding = Finding("bad-list", "here", "it is torn", "run it again", key="a")
    assert finding.message == "it is torn; run it again"
    assert Finding("foreign-file", "here", "it is a stranger").message == "it is a stranger"
    assert finding.as_json() == {
        "kind": "bad-list",
        "path": "here",
        "message": "it is torn; run it again",
        "key": "a",
        "sample": None,
        "entries": (),
        "is_newer": False,
    }


def refuse(error):
    raise error


def damaged(path, *keys):
    entries = tuple(DamagedEntry(key, None, has_copy=False) for key in keys)
    return Finding("corrupt-entry", path, "it is damaged", key=keys[0], entries=entries)


def test_the_corrupt_entries_of_a_segment_are_one_finding_and_all_others_stay_alone():
    others = [Finding("wrong-value", "one", "it is another value", key=key) for key in ("c", "d")]
    assert one_each([]) == []
    assert one_each([damaged("one", "a"), *others, damaged("one", "b"), damaged("two", "e")]) == [
        damaged("one", "a", "b"),
        *others,
        damaged("two", "e"),
    ]


def test_an_entry_is_missing_if_a_sample_needs_it_and_it_has_no_copy():
    entries = (DamagedEntry("a", "1", has_copy=False), DamagedEntry("b", "2", has_copy=True), DamagedEntry("c", None, has_copy=False))
    hit = Finding("corrupt-segment", "one", "it is damaged", entries=entries)
    assert missing_keys([hit, Finding("missing-entry", "two", "it is gone", key="d"), Finding("stale-temp", "tmp/x", "")]) == {"a", "d"}


def test_what_a_look_gives_is_handed_on():
    assert read_or_finding("bad-list", "here", lambda: 7) == 7


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FormatError("it is torn"), Finding("bad-list", "here", "it is torn")),
        (OSError(5, "Input/output error"), Finding("unreadable", "here", "here: Input/output error")),
        (ReadFailed("a disk failed"), Finding("unreadable", "here", "here: a disk failed")),
    ],
)
def test_damage_is_told_apart_from_what_cannot_be_read(error, expected):
    assert read_or_finding("bad-list", "here", partial(refuse, error)) == expected


def test_a_fault_of_our_own_is_no_finding():
    with pytest.raises(KeyError):
        read_or_finding("bad-list", "here", partial(refuse, KeyError("x")))
