"""How the helper treats requests that wait, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from cachestore.core.errors import RemoteFailed
from cachestore.remote import reading_helper as helper
from cachestore.remote.client import ClientLimits
from tests.remote.fake import Bucket

LIMIT = 60.0


@pytest.mark.parametrize(
    ("seconds", "is_answered_meanwhile", "ends"),
    [(LIMIT, False, True), (LIMIT - 2, False, False), (LIMIT, True, False)],
)
def test_requests_that_wait_end_with_one_that_was_in_vain_if_no_other_was_answered(monkeypatch, seconds, is_answered_meanwhile, ends):
    clock = [100.0]

    def before(_verb, key):
        clock[0] += 1
        if key == "gone":
            if is_answered_meanwhile:
                server.work_once()  # as another thread does
            clock[0] += seconds
            raise RemoteFailed("the server did not do it")

    monkeypatch.setattr(helper, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    client = Bucket({"cache/here": b"x"}).client(before=before)
    server = helper._Server(ClientLimits(LIMIT, LIMIT))
    server._clients["s3://bucket/cache"] = client
    for number, key in enumerate(["gone", *["here"] * 4]):
        server.take({"n": number, "do": "get", "address": "s3://bucket/cache", "key": key, "soon": not number})
    server.work_once()
    answers = [server._answers.get_nowait()[0] for _answer in range(server._answers.qsize())]
    failed = {answer["n"]: answer["message"] for answer in answers if "error" in answer}
    assert failed == dict.fromkeys(range(5) if ends else [0], "the server did not do it")
    assert len(client.calls) == 1 + is_answered_meanwhile
    while server._requests.qsize():
        server.work_once()
    assert server._answers.qsize() == 4 - is_answered_meanwhile if not ends else server._answers.empty()
