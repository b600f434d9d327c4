import errno
import os

import pytest

from cachestore.care.collect import collect
from cachestore.core.errors import BadInput, FormatError, MissingEntry, RemoteFailed, StoreNotFound, WriteFailed
from cachestore.core.keys import Recipe
from cachestore.files.paths import Layout
from cachestore.files.records import encode_record
from cachestore.remote.address import parse_address
from cachestore.remote.client import PIECE_BYTES
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from cachestore.store.format.entry import make_entry
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import RECIPE_FORMAT, RECIPE_VERSION, commit, create_store
from tests.fakes import asks_for, publish_catalog, tells_of
from tests.remote.copies import files_of, make, request, wrong_in
from tests.remote.fake import Bucket, FakeClient, Killed
from tests.store.stores import catalog_of, flip, key_of, put, tensors_of


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def pushed(tmp_path, bucket):
    """A store that was pushed into the bucket."""
    layout = make(tmp_path / "origin", [1, 2], [3])
    push_to(bucket.client(), layout, request())
    return layout


def test_a_store_that_was_pulled_is_the_one_that_was_pushed(root, bucket, pushed):
    report = pull_from(bucket.client(), root, request())
    assert files_of(root) == files_of(pushed.root)
    assert wrong_in(root) == []
    assert (report.files, report.skipped, report.requests) == (5, 0, 5)
    assert report.bytes == sum(map(len, files_of(root).values()))
    snapshot = load_snapshot(Layout(root))
    assert (len(snapshot), dict(snapshot.uncovered)) == (3, {})
    snapshot.close()


def test_pulling_again_brings_nothing(root, bucket, pushed):
    pull_from(bucket.client(), root, request())
    client = bucket.client()
    report = pull_from(client, root, request())
    assert (report.files, report.bytes, report.skipped) == (0, 0, 5)
    assert not any(verb == "get_range" and key.startswith("segments") for verb, key in client.calls)


def test_an_empty_store_is_pulled_as_one(root, bucket, tmp_path):
    push_to(bucket.client(), create_store(tmp_path / "nothing"), request())
    assert pull_from(bucket.client(), root, request()).files == 0
    assert wrong_in(root) == []


def test_a_named_data_set_comes_with_what_its_newest_generation_needs(root, bucket, pushed, tmp_path):
    push_to(bucket.client(), make(tmp_path / "other", [7], name="second"), request())
    report = pull_from(bucket.client(), root, request(name="train"))
    assert report.generations == {"train": (2,)}
    found = files_of(root)
    assert [path for path in found if path.startswith("catalogs")] == ["catalogs/train/2.safetensors"]
    assert list_segments(Layout(root)) == list_segments(pushed)
    assert wrong_in(root) == []
    pull_from(bucket.client(), root, request(name="second", generation=1))
    assert wrong_in(root) == []
    assert len(list_segments(Layout(root))) == 3


def test_without_an_index_the_headers_are_read(root, bucket, pushed):
    for key in [key for key in bucket.objects if "/index/" in key]:
        bucket.objects[key] = bucket.objects[key][:-1]
    client = bucket.client()
    pull_from(client, root, request(name="train", generation=1))
    assert len(list_segments(Layout(root))) == 1
    assert wrong_in(root) == []


def test_what_comes_joins_what_is_there(root, bucket, pushed):
    make(root, [5], name="own")
    marker, before = (root / "cachestore.json").read_bytes(), files_of(root)
    pull_from(bucket.client(), root, request())
    assert files_of(root) == before | files_of(pushed.root)
    assert wrong_in(root) == []
    assert (root / "cachestore.json").read_bytes() == marker


def test_a_dry_run_makes_nothing(root, bucket, pushed):
    report = pull_from(bucket.client(), root, request(dry_run=True))
    assert (report.files, report.applied) == (5, False)
    assert report.bytes == sum(map(len, files_of(pushed.root).values()))
    assert not root.exists()


def test_another_generation_of_the_same_number_is_refused_by_name_and_stays(root, bucket, pushed):
    make(root, [9])
    before = files_of(root)
    with pytest.raises(BadInput, check=asks_for("name")):
        pull_from(bucket.client(), root, request())
    assert files_of(root) == before


def test_a_generation_that_a_job_publishes_meanwhile_is_refused_and_stays(root, bucket, pushed):
    layout = create_store(root)

    def before(verb, key):
        if key.startswith("segments/") and verb == "get_range" and not layout.catalog("train", 1).exists():
            put(layout, 9)
            publish_catalog(layout, catalog_of(9))

    with pytest.raises(BadInput, check=asks_for("name")):
        pull_from(bucket.client(before=before), root, request(jobs=1))
    assert wrong_in(root) == []


def test_a_folder_with_other_contents_is_refused(root, bucket, pushed):
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    with pytest.raises(BadInput):
        pull_from(bucket.client(), root, request())
    assert os.listdir(root) == ["notes.txt"]


def test_where_no_store_is_nothing_is_made(root, bucket):
    with pytest.raises(StoreNotFound):
        pull_from(bucket.client(), root, request())
    assert not root.exists()


def test_a_misspelt_data_set_makes_nothing(root, bucket, pushed):
    with pytest.raises(BadInput, check=asks_for("name")):
        pull_from(bucket.client(), root, request(name="trian"))
    assert not root.exists()


@pytest.mark.parametrize("kind", ["segments", "recipes", "catalogs"])
def test_a_flipped_bit_is_refused_and_never_published(root, bucket, pushed, kind):
    keys = [key for key in bucket.objects if f"/{kind}/" in key]
    before = {key: bucket.objects[key] for key in keys}
    for key in keys:
        at = len(bucket.objects[key]) - 3
        bucket.objects[key] = before[key][:at] + bytes([before[key][at] ^ 4]) + before[key][at + 1 :]
    with pytest.raises(FormatError, check=tells_of(f"s3://bucket/cache/{kind}/")):
        pull_from(bucket.client(), root, request())
    assert not any(path.startswith(("catalogs", kind)) for path in files_of(root))
    bucket.objects.update(before)
    pull_from(bucket.client(), root, request())
    assert files_of(root) == files_of(pushed.root)


@pytest.mark.parametrize("kind", ["cachestore.json", "segments", "recipes", "catalogs", "index"])
@pytest.mark.parametrize("wrong", ["flipped", "short", "of another object"])
@pytest.mark.parametrize("name", [None, "train"])
def test_an_answer_that_is_wrong_once_changes_nothing(root, bucket, pushed, kind, wrong, name):
    push_to(bucket.client(), make(pushed.root.parent / "second", [7], [8], name="second"), request())
    other = Recipe("other", {"is": "other"})
    bucket.objects[f"cache/recipes/{other.fingerprint}.json"] = encode_record(RECIPE_FORMAT, RECIPE_VERSION, other.as_json())
    client, spoilt = SpoiltOnce(bucket, kind, wrong), request(name=name, jobs=1)
    pull_from(client, root, spoilt)
    assert client.spoilt == (kind != "index" or name is not None)
    wanted = {path: data for path, data in files_of(pushed.root).items() if name is None or path != "catalogs/train/1.safetensors"}
    assert files_of(root).items() >= wanted.items()
    assert wrong_in(root) == []


class SpoiltOnce(FakeClient):
    """A client of which the first answer for a kind of object is wrong."""

    def __init__(self, bucket, kind, wrong):
        super().__init__(bucket, parse_address("address", "s3://bucket/cache"))
        self.kind, self.wrong, self.spoilt = kind, wrong, False

    def get(self, key):
        return self._spoil(key, super().get(key))

    def get_range(self, key, start, size):
        return self._spoil(key, super().get_range(key, start, size))

    def _spoil(self, key, data):
        if self.spoilt or not key.startswith(self.kind):
            return data
        self.spoilt = True
        if self.wrong == "of another object":
            others = [one for one in self.bucket.objects if one.startswith(f"cache/{self.kind}") and not one.endswith(key)]
            return self.bucket.objects[others[0]] if others else b"another"
        return data[: len(data) // 2] if self.wrong == "short" else data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("lost", ["cache/catalogs/train/2.safetensors", "cache/segments/", "cache/index/", "cache/cachestore.json"])
def test_an_old_listing_changes_nothing(root, bucket, pushed, lost):
    """As a server gives it once that does not know the newest objects yet."""

    class Old(FakeClient):
        kept = None

        def _act(self, verb, key, act):
            if verb not in {"list", "get"} or self.kept or key != lost.split("/")[1]:
                return super()._act(verb, key, act)
            self.kept = {one: bucket.objects.pop(one) for one in list(bucket.objects) if one.startswith(lost)}
            try:
                return super()._act(verb, key, act)
            finally:
                bucket.objects.update(self.kept)

    client = Old(bucket, parse_address("address", "s3://bucket/cache"))
    pull_from(client, root, request(name="train", generation=2))
    assert client.kept
    assert wrong_in(root) == []
    assert "catalogs/train/2.safetensors" in files_of(root)


def test_a_damaged_segment_of_the_folder_is_named_and_repair_helps(root, bucket, pushed):
    from cachestore.care.repair import repair

    pull_from(bucket.client(), root, request())
    path = Layout(root).segment(min(list_segments(Layout(root))))
    flip(path, path.stat().st_size - 1)
    assert pull_from(bucket.client(), root, request()).files == 0
    with pytest.raises(FormatError):
        pull_from(bucket.client(), root, request(check=True))
    repair(root)
    pull_from(bucket.client(), root, request())
    assert files_of(pushed.root).items() <= files_of(root).items()


def test_a_store_that_lacks_values_gives_no_catalog(root, bucket, pushed):
    for key in [key for key in bucket.objects if "/segments/" in key]:
        del bucket.objects[key]
    for name in (None, "train"):
        with pytest.raises(MissingEntry, check=tells_of("s3://bucket/cache", "'train'")):
            pull_from(bucket.client(), root, request(name=name))
    assert not any(path.startswith("catalogs") for path in files_of(root))


def test_a_pull_that_is_killed_at_any_request_goes_on(root, bucket, pushed, tmp_path):
    client = bucket.client()
    pull_from(client, root, request(name="train"))
    for k in range(len(client.calls)):
        left = [k]

        def strike(_verb, _key, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        folder = tmp_path / str(k)
        with pytest.raises(Killed):
            pull_from(bucket.client(before=strike), folder, request(name="train", jobs=1))
        if (folder / "cachestore.json").exists():
            assert wrong_in(folder) == []
        pull_from(bucket.client(), folder, request(name="train"))
        assert files_of(folder) == files_of(root)
        assert wrong_in(folder) == []


def test_two_pulls_into_one_folder_at_once_end_with_all_of_it(root, bucket, pushed):
    meanwhile = []

    def before(verb, key):
        if verb == "get_range" and key.startswith("segments/") and not meanwhile:
            meanwhile.append(pull_from(bucket.client(), root, request()))

    pull_from(bucket.client(before=before), root, request())
    assert files_of(root) == files_of(pushed.root)
    assert wrong_in(root) == []


@pytest.mark.parametrize("moment", ["segments/", "recipes/"])
def test_what_gc_removes_beside_a_pull_comes_again(root, tmp_path, bucket, moment):
    """Without a grace period: with one a day passes before segments go that no catalog names yet."""
    origin = make(tmp_path / "origin")
    for n in (1, 2, 3):
        publish_segment(origin, [make_entry(key_of(n), tensors_of(n), {"input_digest": "00" * 32})], origin="0" * 32 + "/0")
    publish_catalog(origin, catalog_of(1, 2, 3))
    push_to(bucket.client(), origin, request())
    create_store(root)
    removed = []

    def after(verb, key):
        if verb in {"get", "get_range"} and key.startswith(moment) and len(removed) < 2:
            before = list_segments(Layout(root))
            collect(root, apply=True, grace_seconds=0)
            collect(root, apply=True, grace_seconds=0)
            removed.append(before - list_segments(Layout(root)))

    pull_from(bucket.client(after=after), root, request(jobs=1))
    assert any(removed)
    assert wrong_in(root) == []
    collect(root, apply=True, grace_seconds=0)
    collect(root, apply=True, grace_seconds=0)
    assert wrong_in(root) == []


def test_a_full_disk_is_an_error_that_says_so_and_the_same_command_goes_on(root, bucket, pushed, monkeypatch):
    from cachestore.files import publish

    def full(_descriptor, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publish, "_write_all", full)
        with pytest.raises(WriteFailed):
            pull_from(bucket.client(), root, request())
    pull_from(bucket.client(), root, request())
    assert files_of(root) == files_of(pushed.root)


def test_a_request_that_fails_while_a_segment_comes_stays_what_it_is(root, bucket, pushed):
    def before(verb, key):
        if key.startswith("segments/") and verb == "get_range":
            raise RemoteFailed("cannot read it")

    with pytest.raises(RemoteFailed):
        pull_from(bucket.client(before=before), root, request())


def test_a_large_segment_comes_in_pieces(root, tmp_path, bucket):
    import numpy as np

    import cachestore as cs

    with cs.open(tmp_path / "large", mode="a") as store:
        store.put(cs.key("large"), {"x": np.arange(PIECE_BYTES // 4, dtype=np.int64)})
        store.commit()
        pushed = push_to(bucket.client(), store.layout, request())
    client = bucket.client()
    report = pull_from(client, root, request())
    assert (pushed.requests, report.requests) == (5, 3)
    assert sum(verb == "get_range" and key.startswith("segments") for verb, key in client.calls) == 3
    with cs.open(root) as store:
        assert store.get(cs.key("large"), as_numpy=True)["x"][-1] == PIECE_BYTES // 4 - 1


def test_a_job_goes_on_from_a_pulled_store(root, bucket, pushed):
    pull_from(bucket.client(), root, request())
    layout = create_store(root)
    put(layout, 4)
    publish_catalog(layout, catalog_of(1, 2, 3, 4))
    commit(layout).close()
    push_to(bucket.client(), layout, request())
    assert "cache/catalogs/train/3.safetensors" in bucket.objects
