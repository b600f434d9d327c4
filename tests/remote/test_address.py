import pytest

from cachestore.core.errors import BadInput
from cachestore.remote.address import parse_address
from tests.fakes import asks_for


@pytest.mark.parametrize(
    ("given", "parts", "shown"),
    [
        ("s3://bucket/a/cache", ("s3", "bucket", "a/cache"), "s3://bucket/a/cache"),
        ("S3://bucket", ("s3", "bucket", ""), "s3://bucket"),
        ("gs://my-bucket/cache/", ("gs", "my-bucket", "cache"), "gs://my-bucket/cache"),
        ("az://container/x y", ("az", "container", "x y"), "az://container/x y"),
        ("file:///data/cache", ("file", "", "data/cache"), "file:///data/cache"),
        ("file:///", ("file", "", ""), "file:///"),
    ],
)
def test_an_address_has_a_scheme_a_bucket_and_a_prefix(given, parts, shown):
    address = parse_address("store", given)
    assert (address.scheme, address.bucket, address.prefix) == parts
    assert str(address) == shown
    assert parse_address("store", str(address)) == address


def test_keys_begin_with_the_prefix():
    assert parse_address("store", "s3://bucket/a/cache").key("recipes/x.json") == "a/cache/recipes/x.json"
    assert parse_address("store", "s3://bucket").key("recipes/x.json") == "recipes/x.json"
    assert parse_address("store", "s3://bucket/cache").key("") == "cache"
    assert parse_address("store", "s3://bucket/cache").of("x") == "s3://bucket/cache/x"
    assert parse_address("store", "s3://bucket").of("x") == "s3://bucket/x"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cache/", "must be the address of a store"),
        ("s3:/bucket/cache", "must be the address of a store"),
        (None, "must be the address of a store"),
        ("ftp://host/cache", "begins with ftp://, but cachestore knows s3://, gs://, az://, file://"),
        ("https://bucket.s3.amazonaws.com/cache", "begins with https://"),
        ("s3://", "names no bucket"),
        ("s3:///cache", "names no bucket"),
        ("s3://b/cache", "has the bucket 'b'"),
        ("s3://bucket//cache", "has an empty part"),
        ("s3://bucket/../cache", "or one that is . or .."),
        ("file://data/cache", "must have three slashes"),
        ("s3://bucket/a?endpoint=http://x", "the endpoint and the credentials come from the environment"),
        ("s3://bucket/a\nb", "may hold a bucket and a path only"),
    ],
)
def test_what_is_no_address_is_refused_with_a_sentence(given, words):
    with pytest.raises(BadInput, check=asks_for("store")) as refused:
        parse_address("store", given)
    assert words in str(refused.value)


def test_a_password_in_an_address_is_not_repeated():
    with pytest.raises(BadInput) as refused:
        parse_address("store", "s3://AKIDKEY:hushhush@bucket/cache")
    assert "hushhush" not in str(refused.value)
    assert "AKIDKEY" not in str(refused.value)
