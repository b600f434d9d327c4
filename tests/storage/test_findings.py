"""What a look at a file gives, or what is wrong with the file."""

from functools import partial

import pytest

from cachestore.core.errors import FormatError, ReadFailed
from cachestore.storage.findings import Finding, tried


def refuse(error):
    raise error


def test_what_a_look_gives_is_handed_on():
    assert tried("bad-list", "here", lambda: 7) == 7


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FormatError("it is torn"), Finding("bad-list", "here", "it is torn")),
        (OSError(5, "Input/output error"), Finding("unreadable", "here", "here: Input/output error")),
        (ReadFailed("a disk failed"), Finding("unreadable", "here", "here: a disk failed")),
    ],
)
def test_damage_is_told_apart_from_what_cannot_be_read(error, expected):
    assert tried("bad-list", "here", partial(refuse, error)) == expected


def test_a_fault_of_our_own_is_no_finding():
    with pytest.raises(KeyError):
        tried("bad-list", "here", partial(refuse, KeyError("x")))
