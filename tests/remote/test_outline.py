import os
from itertools import count

import pytest

from cachestore.core.errors import BadInput, FormatError, RemoteFailed, StoreNotFound
from cachestore.files.paths import Layout
from cachestore.remote.outline import (
    WrongAnswer,
    ask_until_sure,
    choose_generations,
    draw_segments,
    fetch_catalog,
    fetch_index,
    remote_header,
    require_store,
    start_of,
    take_inventory,
)
from cachestore.remote.push import push_to
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write.commit import commit
from tests.fakes import tells_of
from tests.remote.copies import make, request
from tests.remote.fake import Bucket, FakeClient
from tests.store.stores import key_of


@pytest.fixture
def client(root):
    bucket = Bucket()
    push_to(bucket.client(), make(root, [1, 2], [3]), request())
    return bucket.client()


def drawn(client, folder):
    outline = Layout(folder)
    inventory = take_inventory(client)
    fetch_index(client, inventory, outline)
    draw_segments(outline, inventory.segments, remote_header(client))
    return outline


def test_an_outline_knows_where_each_entry_lies_and_holds_no_value(client, root, tmp_path):
    outline = drawn(client, tmp_path / "outline")
    ours, theirs = load_snapshot(outline), load_snapshot(Layout(root))
    assert [ours.find([key_of(n)]) for n in (1, 2, 3)] == [theirs.find([key_of(n)]) for n in (1, 2, 3)]
    assert not any(verb == "get_range" and key.startswith("segments/") for verb, key in client.calls)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", None], ids=["cut", "empty", "gone"])
def test_without_a_good_index_headers_are_read(client, tmp_path, damage):
    for key in [key for key in client.bucket.objects if "/index/" in key]:
        data = client.bucket.objects.pop(key)
        if damage is not None:
            client.bucket.objects[key] = damage(data)
    outline = drawn(client, tmp_path / "outline")
    snapshot = load_snapshot(outline)
    assert (len(snapshot), len(snapshot.uncovered)) == (3, 2)
    snapshot.close()
    commit(outline).close()
    assert len(list_segments(outline)) == 2


def test_a_long_header_takes_a_second_read():
    data = (500_000).to_bytes(8, "little") + os.urandom(600_000)
    asked = []

    def read(start, size):
        asked.append((start, size))
        return data[start : start + size]

    assert start_of(read, len(data)) == data[: 8 + 500_000]
    assert len(asked) == 2
    assert start_of(lambda start, size: data[start : start + size], 100) == data[:100]


def test_a_segment_with_a_damaged_header_counts_as_missing(client, tmp_path):
    for key in [key for key in client.bucket.objects if "/index/" in key]:
        del client.bucket.objects[key]
    damaged = next(key for key in client.bucket.objects if "/segments/" in key)
    client.bucket.objects[damaged] = b"\xff" * 200
    snapshot = load_snapshot(drawn(client, tmp_path / "outline"))
    assert len(snapshot.unreadable) == 1


def test_foreign_objects_are_not_listed(client):
    client.bucket.objects["cache/segments/ab/notes.txt"] = b"x"
    client.bucket.objects["cache/catalogs/%/1.safetensors"] = b"x"
    client.bucket.objects["cache/tmp/x"] = b"x"
    inventory = take_inventory(client)
    assert len(inventory.segments) == 2
    assert list(inventory.catalogs) == ["train"]


def damaged(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_damaged_object_is_named_after_two_looks_at_it(client, tmp_path):
    key = "cache/catalogs/train/1.safetensors"
    client.bucket.objects[key] = damaged(client.bucket.objects[key])
    looks = count()

    def look():
        return fetch_catalog(client, take_inventory(client), "train", 1, Layout(tmp_path / str(next(looks))))

    with pytest.raises(FormatError, check=tells_of("s3://bucket/cache/catalogs/train/1.safetensors")) as said:
        ask_until_sure(look)
    assert not isinstance(said.value, WrongAnswer)
    assert next(looks) == 2


def test_an_answer_that_is_wrong_once_is_not_noticed(client, tmp_path):
    wrong, looks = [damaged], count()

    class Once(FakeClient):
        def get_range(self, key, start, size):
            data = super().get_range(key, start, size)
            return wrong.pop()(data) if wrong else data

    once = Once(client.bucket, client.address)
    catalog = ask_until_sure(lambda: fetch_catalog(once, take_inventory(once), "train", 1, Layout(tmp_path / str(next(looks)))))
    assert (catalog.generation, wrong) == (1, [])


def test_answers_that_are_wrong_in_another_way_each_time_are_no_damage_of_the_object(client):
    class Noisy(FakeClient):
        def get(self, key):
            return super().get(key) + os.urandom(8)

    with pytest.raises(RemoteFailed) as said:
        ask_until_sure(lambda: require_store(Noisy(client.bucket, client.address)))
    assert "remove" not in str(said.value)


def test_what_only_one_look_misses_is_there():
    answers = [BadInput("it has no data set"), StoreNotFound("there is no store"), "found"]

    def look():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert ask_until_sure(look) == "found"
    answers += [BadInput("it has no data set", option="name"), BadInput("it has no generation 2", option="generation"), "found"]
    assert ask_until_sure(look) == "found"
    answers += [BadInput("a"), StoreNotFound("b"), BadInput("a"), "found"]
    with pytest.raises(BadInput):
        ask_until_sure(look)


def test_headers_are_read_until_two_reads_agree(client):
    header_of, some = remote_header(client), dict(take_inventory(client).segments)
    digest, size = some.popitem()
    right = header_of(digest, size)

    class Once(FakeClient):
        wrong = 1

        def get_range(self, key, start, size):
            self.wrong, is_wrong = 0, self.wrong
            return damaged(super().get_range(key, start, size)) if is_wrong else super().get_range(key, start, size)

    assert remote_header(Once(client.bucket, client.address))(digest, size) == right


def test_an_index_that_came_damaged_comes_once_more(client, tmp_path):
    spoilt = []

    class Once(FakeClient):
        def get_range(self, key, start, size):
            data = super().get_range(key, start, size)
            if key.startswith("index/") and not spoilt:
                spoilt.append(key)
                return damaged(data)
            return data

    once, outline = Once(client.bucket, client.address), Layout(tmp_path / "outline")
    fetch_index(once, take_inventory(once), outline)
    assert len(list_indexes(outline)) == len(spoilt) == 1


def test_a_generation_is_the_newest_unless_one_is_given():
    there = {"train": [1, 3], "other": [2]}
    assert choose_generations(there, None, None, where="here") == {"other": [2], "train": [1, 3]}
    assert choose_generations(there, "train", None, where="here") == {"train": [3]}
    assert choose_generations(there, "train", 1, where="here") == {"train": [1]}
    assert choose_generations({}, None, None, where="here") == {}
