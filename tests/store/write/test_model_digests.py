"""The cache of model-file digests."""

from cachestore.files.opening import names_in
from cachestore.store.write.model_digests import load_digests, publish_digests
from tests.store.stores import flip


def test_a_new_store_remembers_nothing(layout):
    assert load_digests(layout, "host") == {}


def test_nothing_added_makes_no_file(layout):
    publish_digests(layout, "host", {})
    assert names_in(layout.digests) == []


def test_what_runs_added_is_put_together(layout):
    publish_digests(layout, "host", {"a": "1"})
    publish_digests(layout, "host", {"b": "2"})
    publish_digests(layout, "host", {"b": "2"})
    assert load_digests(layout, "host") == {"a": "1", "b": "2"}
    assert len(names_in(layout.digests)) == 2


def test_hosts_do_not_see_each_other(layout):
    hosts = ("host", "host2", "host-2", "a/b", "猫")
    for number, host in enumerate(hosts):
        publish_digests(layout, host, {"a": str(number)})
    assert [load_digests(layout, host) for host in hosts] == [{"a": str(n)} for n in range(5)]


def test_a_damaged_file_is_passed_over(layout):
    publish_digests(layout, "host", {"a": "1"})
    [name] = names_in(layout.digests)
    publish_digests(layout, "host", {"b": "2"})
    flip(layout.digests / name, 12)
    assert load_digests(layout, "host") == {"b": "2"}


def test_files_that_are_not_ours_are_passed_over(layout):
    publish_digests(layout, "host", {"a": "1"})
    (layout.digests / "host-notes.txt").write_text("x")
    (layout.digests / "host-x.json").write_text("x")
    assert load_digests(layout, "host") == {"a": "1"}
