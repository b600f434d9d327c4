import shutil

import pytest

from cachestore.care.collect import collect, compact
from cachestore.care.gc import mark
from cachestore.core.errors import BadInput, FormatError, MissingEntry, RemoteFailed, StoreNotFound
from cachestore.files.paths import Layout
from cachestore.files.records import encode_record
from cachestore.remote.address import parse_address
from cachestore.remote.listing import list_client
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit
from tests.fakes import asks_for, publish_catalog, tells_of
from tests.remote.copies import files_of, make, objects_of, request, wrong_in
from tests.remote.fake import Bucket, FakeClient, Killed
from tests.store.stores import catalog_of, entry_of, flip, put, read


@pytest.fixture
def bucket():
    return Bucket()


def sent(client):
    return [key for verb, key in client.calls if verb in {"put", "put_new"}]


def test_a_store_that_was_pushed_is_all_there(root, bucket):
    layout = make(root, [1, 2], [3])
    client = bucket.client()
    report = push_to(client, layout, request())
    assert objects_of(client) == files_of(root)
    assert "cache/cachestore.json" in bucket.objects
    assert (report.files, report.skipped, report.applied) == (5, 0, True)
    assert report.bytes == sum(map(len, files_of(root).values()))
    assert report.generations == {"train": (1, 2)}


def test_what_is_there_already_is_not_sent_again(root, bucket):
    layout = make(root, [1, 2], [3])
    push_to(bucket.client(), layout, request())
    client = bucket.client()
    report = push_to(client, layout, request())
    assert (report.files, report.bytes, report.skipped) == (0, 0, 5)
    assert sent(client) == []
    put(layout, 4)
    client = bucket.client()
    push_to(client, layout, request())
    assert [key.partition("/")[0] for key in sent(client)] == ["segments", "index"]
    assert objects_of(client) == files_of(root)


def test_an_empty_store_has_nothing_to_send_but_its_marker(layout, bucket):
    report = push_to(bucket.client(), layout, request())
    assert (report.files, report.bytes) == (0, 0)
    assert list(bucket.objects) == ["cache/cachestore.json"]


def test_everything_goes_before_the_catalog_that_names_it(root, bucket):
    layout = make(root, [1, 2], [3])
    client = bucket.client()
    push_to(client, layout, request(jobs=1))
    order = [key.partition("/")[0] for key in sent(client)]
    assert order == ["cachestore.json", "segments", "segments", "recipes", "index", "catalogs", "catalogs"]
    assert sent(client)[-2:] == ["catalogs/train/1.safetensors", "catalogs/train/2.safetensors"]


def test_of_a_named_data_set_only_what_its_generation_needs_goes(root, bucket):
    layout = make(root, [1, 2], [3])
    put(layout, 7)
    client = bucket.client()
    report = push_to(client, layout, request(name="train", generation=1))
    assert report.generations == {"train": (1,)}
    there = objects_of(client)
    assert sorted(key.partition("/")[0] for key in there) == ["catalogs", "recipes", "segments"]
    assert "catalogs/train/1.safetensors" in there
    assert push_to(bucket.client(), layout, request(name="train")).generations == {"train": (2,)}


def test_a_dry_run_says_what_would_go_and_sends_nothing(root, bucket):
    layout = make(root, [1, 2], [3])
    client = bucket.client()
    report = push_to(client, layout, request(dry_run=True))
    assert (report.files, report.requests, report.applied) == (5, 5, False)
    assert report.bytes == sum(map(len, files_of(root).values()))
    assert bucket.objects == {}


def test_two_stores_at_one_address_are_one_store(tmp_path, bucket):
    one, other = make(tmp_path / "one", [1, 2]), make(tmp_path / "other", [2, 3], [4], name="second")
    push_to(bucket.client(), one, request())
    push_to(bucket.client(), other, request())
    assert objects_of(bucket.client()) == files_of(one.root) | files_of(other.root)
    pull_from(bucket.client(), tmp_path / "both", request())
    assert files_of(tmp_path / "both") == files_of(one.root) | files_of(other.root)
    assert wrong_in(tmp_path / "both") == []


def test_the_index_covers_all_that_is_at_the_address(tmp_path, bucket):
    push_to(bucket.client(), make(tmp_path / "one", [1, 2]), request())
    push_to(bucket.client(), make(tmp_path / "other", [3], name="second"), request())
    copy = Layout(tmp_path / "copy")
    for key, data in bucket.objects.items():
        path = copy.root / key.removeprefix("cache/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    snapshot = load_snapshot(copy)
    assert len(list_indexes(copy)) == 2
    assert (len(snapshot), dict(snapshot.uncovered), snapshot.vanished) == (3, {}, frozenset())
    snapshot.close()


def test_another_generation_of_the_same_number_is_refused_by_name_and_stays(tmp_path, bucket):
    push_to(bucket.client(), make(tmp_path / "one", [1]), request())
    before = dict(bucket.objects)
    with pytest.raises(BadInput, check=asks_for("name")):
        push_to(bucket.client(), make(tmp_path / "other", [2]), request())
    assert bucket.objects == before


def test_a_generation_that_another_pusher_sends_meanwhile_is_refused_and_stays(tmp_path, bucket):
    one, other = make(tmp_path / "one", [1]), make(tmp_path / "other", [2])

    def before(verb, key):
        if verb == "put_new" and key.startswith("catalogs/"):
            push_to(bucket.client(), other, request())

    with pytest.raises(BadInput, check=asks_for("name")):
        push_to(bucket.client(before=before), one, request())
    assert bucket.objects["cache/catalogs/train/1.safetensors"] == other.catalog("train", 1).read_bytes()


def test_two_pushers_of_one_store_at_once_end_with_all_of_it(root, bucket):
    layout = make(root, [1, 2], [3])
    meanwhile = []

    def before(verb, _key):
        if verb.startswith("put") and not meanwhile:
            meanwhile.append(push_to(bucket.client(), layout, request()))

    push_to(bucket.client(before=before), layout, request())
    assert objects_of(bucket.client()) == files_of(root)


def test_a_killed_push_goes_on_where_it_was(root, bucket, tmp_path):
    layout = make(root, [1, 2], [3])
    client = bucket.client()
    push_to(client, layout, request())
    for moment, count in (("before", len(client.calls)), ("after", len(client.calls) - 1)):  # the look at the marker fails
        for k in range(count):
            fresh = Bucket()
            left = [k]

            def strike(_verb, _key, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

            with pytest.raises(Killed):
                push_to(
                    fresh.client(before=strike if moment == "before" else None, after=strike if moment == "after" else None),
                    layout,
                    request(jobs=1),
                )
            if "cache/cachestore.json" in fresh.objects:
                pulled = tmp_path / f"{moment}{k}"
                pull_from(fresh.client(), pulled, request())
                assert wrong_in(pulled) == []
            push_to(fresh.client(), layout, request())
            assert objects_of(fresh.client()) == files_of(root)


def test_a_failing_request_ends_the_push_and_its_threads(root, bucket):
    layout = make(root, *([n] for n in range(12)))

    def before(verb, _key):
        if verb == "put":
            raise RemoteFailed("no")

    client = bucket.client(before=before)
    with pytest.raises(RemoteFailed, match="no"):
        push_to(client, layout, request(jobs=3))
    assert len(sent(client)) <= 1 + 3


def test_segments_that_gc_removes_meanwhile_are_found_again(root, bucket):
    layout = make(root, [1, 2, 3])
    publish_segment(layout, [entry_of(n) for n in (1, 2)], origin="0" * 32 + "/0")
    put(layout, 5)
    commit(layout).close()
    [first] = [digest for digest in list_segments(layout) if len(read_entries(layout, digest)) == 3]
    done = []

    def before(verb, _key):
        if verb == "put_new" and not done:
            done.append(mark(layout, [first]))
            collect(layout.root, apply=True, grace_seconds=0)

    push_to(bucket.client(before=before), layout, request())
    assert first not in list_segments(layout)
    assert "cache/catalogs/train/1.safetensors" in bucket.objects
    pull_from(bucket.client(), root.parent / "pulled", request())
    assert wrong_in(root.parent / "pulled") == []
    assert read(Layout(root.parent / "pulled"), 3) == read(layout, 3)


def read_entries(layout, digest):
    from cachestore.store.format.segment import read_contents

    return read_contents(layout.segment(digest)).entries


def test_segments_that_are_marked_for_deletion_stay_behind(root, bucket):
    layout = make(root, [1, 2])
    digest = put(layout, 9, origin="0" * 32 + "/0")
    mark(layout, [digest])
    push_to(bucket.client(), layout, request())
    assert f"cache/segments/{digest[:2]}/{digest}.safetensors" not in bucket.objects
    assert objects_of(bucket.client()).keys() < files_of(root).keys()


def test_a_compacted_store_is_pushed_beside_what_was_there(root, bucket):
    layout = make(root, [1], [2], [3])
    push_to(bucket.client(), layout, request())
    compact(root)
    push_to(bucket.client(), layout, request())
    pull_from(bucket.client(), root.parent / "pulled", request(name="train"))
    assert wrong_in(root.parent / "pulled") == []


def test_a_catalog_whose_values_are_lost_does_not_go(root, bucket):
    layout = make(root, [1, 2])
    shutil.rmtree(layout.segments)
    with pytest.raises(MissingEntry, check=tells_of("generation 1", "'train'", "cachestore repair")):
        push_to(bucket.client(), layout, request())
    assert bucket.objects == {}


def test_with_check_what_is_damaged_at_the_address_is_sent_again(root, bucket):
    layout = make(root, [1, 2], [3])
    push_to(bucket.client(), layout, request())
    key = next(key for key in bucket.objects if "/segments/" in key)
    whole = bucket.objects[key]
    bucket.objects[key] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert push_to(bucket.client(), layout, request()).files == 0
    assert push_to(bucket.client(), layout, request(check=True)).files == 1
    assert bucket.objects[key] == whole
    bucket.objects[key] = whole[:-1]
    push_to(bucket.client(), layout, request())
    assert bucket.objects[key] == whole


def test_with_check_a_damaged_segment_does_not_go(root, bucket):
    layout = make(root, [1, 2])
    [digest] = list_segments(layout)
    flip(layout.segment(digest), layout.segment(digest).stat().st_size - 1)
    with pytest.raises(FormatError):
        push_to(bucket.client(), layout, request(check=True))
    assert not any("/catalogs/" in key or "/segments/" in key for key in bucket.objects)


def test_a_marker_of_a_newer_format_is_refused_before_anything_is_sent(root, bucket):
    layout = make(root, [1])
    bucket.objects["cache/cachestore.json"] = encode_record("cachestore-store", 9, {"store_id": "x"})
    with pytest.raises(FormatError):
        push_to(bucket.client(), layout, request())
    assert len(bucket.objects) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "trian"}, "has no data set 'trian'; it has 'train'; did you mean 'train'?"),
        ({"name": "train", "generation": 7}, "has no generation 7 of 'train'; it has 2, 1"),
    ],
)
def test_a_data_set_that_is_not_there_is_refused(root, bucket, given, words):
    with pytest.raises(BadInput) as refused:
        push_to(bucket.client(), make(root, [1], [2]), request(**given))
    assert words in str(refused.value)
    assert bucket.objects == {}


def test_progress_counts_bytes_up_to_all_of_them(root, bucket):
    seen = []
    report = push_to(bucket.client(), make(root, [1, 2], [3]), request(on_progress=lambda *shown: seen.append(shown)))
    assert {total for _doing, _done, total in seen} == {report.bytes}
    assert [done for _doing, done, _total in seen] == sorted(done for _doing, done, _total in seen)
    assert {"sending segments", "sending recipes", "sending catalogs"} <= {doing for doing, _done, _total in seen}


def test_ls_names_generations_samples_and_sizes(root, bucket):
    layout = make(root, [1, 2], [3])
    push_to(bucket.client(), layout, request())
    found = list_client(bucket.client())
    assert [(one.name, one.generation, one.samples) for one in found.catalogs] == [("train", 1, 2), ("train", 2, 3)]
    assert found.catalogs[0].bytes == layout.catalog("train", 1).stat().st_size
    assert (found.segments, found.bytes) == (2, sum(len(data) for key, data in files_of(root).items() if key.startswith("segments")))


def test_ls_of_nothing_says_that_there_is_no_store(bucket):
    with pytest.raises(StoreNotFound, check=tells_of("s3://bucket/cache", "cachestore push")):
        list_client(bucket.client())


def test_ten_thousand_segments_are_listed_in_pages(root, bucket):
    layout = make(root, [1])
    push_to(bucket.client(), layout, request())
    for n in range(10_000):
        bucket.objects[f"cache/segments/{n % 256:02x}/{n % 256:02x}{n:030x}.safetensors"] = b""
    client = bucket.client()
    assert list_client(client).segments == 10_001
    assert sum(call == ("list", "segments") for call in client.calls) == 11


def test_equal_rows_that_were_published_with_other_paths_are_the_same_generation(tmp_path, bucket):
    from dataclasses import replace

    push_to(bucket.client(), make(tmp_path / "one", [1]), request())
    other = make(tmp_path / "other")
    put(other, 1)
    publish_catalog(other, replace(catalog_of(1), request={"own": {"data": "/elsewhere"}}))
    assert push_to(bucket.client(), other, request()).skipped >= 1


def test_a_catalog_is_sent_only_if_a_second_listing_has_its_segments_too(root, bucket):
    """The first one has what is not there: it is an old one, or another store's."""
    layout = make(root, [1, 2], [3])
    push_to(bucket.client(), layout, request())
    ghosts, bucket.objects = dict(bucket.objects), {}

    class Ghostly(FakeClient):
        seen = 0

        def list(self, folder=""):
            there = self.bucket.objects
            if folder == "segments" and not self.seen:
                self.seen, self.bucket.objects = 1, ghosts
            yield from super().list(folder)
            self.bucket.objects = there

    client = Ghostly(bucket, parse_address("address", "s3://bucket/cache"))
    push_to(client, layout, request())
    assert client.seen
    assert objects_of(bucket.client()) == files_of(root)
