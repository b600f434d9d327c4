import os

import pytest

from cachestore.core.errors import FormatError
from cachestore.files.paths import Layout
from cachestore.remote.push import push_to
from cachestore.storage.commit import commit
from cachestore.storage.snapshot import list_segments, load_snapshot
from cachestore.store.outline import draw_segments, fetch_index, remote_header, start_of, take_inventory
from tests.objects.fake import Bucket
from tests.remote.copies import make, request
from tests.storage.stores import key_of


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


def test_a_damaged_catalog_is_named_by_its_address(client, tmp_path):
    from cachestore.store.outline import fetch_catalog

    key = "cache/catalogs/train/1.safetensors"
    client.bucket.objects[key] = client.bucket.objects[key][:-1] + b"?"
    with pytest.raises(FormatError, match=r"s3://bucket/cache/catalogs/train/1\.safetensors is damaged: remove it there"):
        fetch_catalog(client, take_inventory(client), "train", 1, Layout(tmp_path / "outline"))
