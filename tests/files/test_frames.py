"""Frames over pipes: what is written is what is read, however it is cut, and nothing else passes."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.files import frames
from cachestore.files.frames import Frames, frame, read_frame

HEADS = st.dictionaries(st.text(), st.none() | st.integers(-9, 9) | st.text() | st.lists(st.text()), max_size=3)
SENT = st.lists(st.tuples(HEADS, st.binary(max_size=40)), max_size=4)


def of(head, body):
    return {**head, "body": len(body)}, body


@given(SENT, st.integers(1, 60))
def test_what_is_sent_arrives_however_the_pipe_cuts_it(sent, step):
    data = b"".join(frame(head, body) for head, body in sent)
    arriving = Frames()
    assert [tuple(one) for start in range(0, len(data), step) for one in arriving.take(data[start : start + step])] == [
        of(*one) for one in sent
    ]
    pipe = io.BytesIO(data)
    assert [tuple(read_frame(pipe, limit_bytes=40) or ()) for _one in sent] == [of(*one) for one in sent]
    assert read_frame(pipe, limit_bytes=40) is None


@given(SENT.filter(bool), st.data())
def test_a_pipe_that_ends_within_a_frame_is_an_early_end(sent, data):
    whole = frame(*sent[0])
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(whole[: data.draw(st.integers(1, len(whole) - 1))]), limit_bytes=40)


@pytest.mark.parametrize(
    "line",
    [
        b"no frame\n",
        b"[]\n",
        b"{}\n",
        b'{"body":-1}\n',
        b'{"body":true}\n',
        b'{"body":1.0}\n',
        b'{"body":' + b"9" * 30 + b"}\n",
        b"[" * 9_999 + b"\n",
        b"x" * 101,
    ],
)
def test_what_is_no_frame_is_refused(line, monkeypatch):
    monkeypatch.setattr(frames, "HEAD_BYTES", 100 if line.startswith(b"x") else 1 << 20)
    with pytest.raises(ValueError):
        read_frame(io.BytesIO(line), limit_bytes=40)
    with pytest.raises(ValueError):
        list(Frames().take(line))
