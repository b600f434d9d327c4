"""The client over obstore: against a small S3 server of the tests' own, and against a folder."""

import io
import os
import pickle
import re

import pytest

from cachestore.core.errors import BadInput, ReadFailed, RemoteFailed
from cachestore.remote.address import parse_address
from cachestore.remote.client import PIECE_BYTES, Client, ClientLimits
from tests.fakes import tells_of
from tests.remote.server import CODES, served
from tests.shares import share

pytestmark = pytest.mark.processes

pytest.importorskip("obstore", reason="the extra [objects] is not installed")

SECRETS = {"AWS_ACCESS_KEY_ID": "AKIDKEY", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_SESSION_TOKEN": "hushtoken"}
SHORT = ClientLimits(request_seconds=1.0, retry_seconds=0.05)
LONG = ClientLimits(request_seconds=2.0, retry_seconds=20.0)
CALLS = {
    "get": lambda client: client.get("a"),
    "get_range": lambda client: client.get_range("a", 1, 2),
    "head": lambda client: client.head("a"),
    "list": lambda client: list(client.list()),
    "put_new": lambda client: client.put_new("b", b"new"),
    "put": lambda client: client.put("b", io.BytesIO(b"new"), 3),
}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("cachestore.remote.client._FIRST_PAUSE", 0.01)
    with served() as (state, url):
        for name, value in {**SECRETS, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        state.objects["cache/a"] = b"value"
        yield state


def client_of(limits=SHORT, address="s3://bucket/cache"):
    return Client(parse_address("address", address), limits=limits)


@pytest.fixture(params=["s3", "file"])
def client(request, tmp_path):
    """A client of an empty store: on the server, and in a folder."""
    if request.param == "file":
        return client_of(address=f"file://{tmp_path}/cache")
    server = request.getfixturevalue("server")
    server.objects.clear()
    return client_of()


def test_an_object_that_was_put_is_listed_and_read(client):
    assert list(client.list()) == []
    assert client.head("recipes/x.json") is None
    client.put("recipes/x.json", io.BytesIO(b"0123456789"), 10)
    assert client.head("recipes/x.json") == 10
    assert client.get("recipes/x.json") == b"0123456789"
    assert client.get_range("recipes/x.json", 2, 3) == b"234"
    assert client.get_range("recipes/x.json", 8, 5) == b"89"
    assert client.get_range("recipes/x.json", 3, 0) == b""
    assert [[tuple(one) for one in page] for page in client.list()] == [[("recipes/x.json", 10)]]
    assert list(client.list("segments")) == []


def test_a_key_keeps_its_per_cent_signs_and_spaces(client):
    client.put_new("catalogs/a%2Fb c/1.safetensors", b"x")
    assert [one.key for page in client.list("catalogs") for one in page] == ["catalogs/a%2Fb c/1.safetensors"]
    assert client.get("catalogs/a%2Fb c/1.safetensors") == b"x"


def test_what_was_created_is_never_replaced_by_put_new(client):
    assert client.put_new("a", b"first") is True
    assert client.put_new("a", b"second") is False
    assert client.get("a") == b"first"
    client.put("a", io.BytesIO(b"third"), 5)
    assert client.get("a") == b"third"


def test_a_large_file_goes_up_in_pieces(client, tmp_path):
    size = 2 * PIECE_BYTES + 17
    data = os.urandom(1024) * (size // 1024) + bytes(size % 1024)
    (tmp_path / "large").write_bytes(data)
    with (tmp_path / "large").open("rb") as file:
        client.put("segments/large", file, size)
    assert client.head("segments/large") == size
    assert b"".join(client.get_range("segments/large", at, PIECE_BYTES) for at in range(0, size, PIECE_BYTES)) == data


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ReadFailed("the disk refuses"), KeyboardInterrupt()])
def test_what_reading_the_file_raises_is_raised_and_nothing_is_visible(client, error):
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1):
            if self.tell():
                raise error
            return super().read(size)

    with pytest.raises(type(error)) as raised:
        client_of(LONG, str(client.address)).put("segments/large", Broken(bytes(3 * PIECE_BYTES)), 3 * PIECE_BYTES)
    assert raised.value is error
    assert client.head("segments/large") is None


def test_ten_thousand_keys_are_listed_in_pages(server):
    server.objects.clear()
    server.objects.update({f"cache/segments/{n:05}": b"x" for n in range(10_000)})
    server.objects["other/x"] = b"x"
    server.faults += [None, None, 503, None, "cut", "reset"]
    pages = list(client_of(LONG).list("segments"))
    assert [one.key for page in pages for one in page] == [f"segments/{n:05}" for n in range(10_000)]
    assert max(map(len, pages)) == 1000


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", share([409, 503, 429, "reset", 500], 2, 1))
def test_a_busy_server_and_a_broken_connection_are_tried_again(server, call, fault):
    server.faults += [fault, fault]
    CALLS[call](client_of(LONG))
    assert server.faults == []


@pytest.mark.parametrize("call", ["get", "get_range", "list"])
def test_a_body_that_ends_in_its_middle_is_read_again(server, call):
    whole = CALLS[call](client_of())
    server.faults += ["cut", "cut"]
    assert CALLS[call](client_of(LONG)) == whole
    assert server.faults == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", share([409, 503, 429, "reset", 500], 2, 1))
def test_it_gives_up_within_its_bound_and_says_how_often_it_tried(server, call, fault):
    server.faults += [fault] * 10_000
    with pytest.raises(
        RemoteFailed, match=r"the server did not do it \(\d+ tries in \d+ s, the last one: .+\); run the same command again"
    ) as said:
        CALLS[call](client_of())
    assert ("no answer" if fault == "reset" else str(fault)) in str(said.value)
    assert "s3://bucket/cache" in str(said.value)


def test_a_server_that_does_not_answer_is_given_up(server):
    server.faults += ["stall"] * 100
    with pytest.raises(RemoteFailed, match="the last one: no answer"):
        client_of(ClientLimits(0.3, 0.1)).get("a")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", [401, 403, 400, 301])
def test_what_the_server_refuses_is_not_tried_again(server, call, fault):
    server.faults += [fault] * 5
    with pytest.raises(RemoteFailed, check=tells_of("AWS_ACCESS_KEY_ID")) as said:
        CALLS[call](client_of(LONG))
    assert len(server.faults) == 4
    assert re.search("s3://bucket/cache/?[ab]?:", str(said.value))


def test_a_missing_object_is_named_with_its_bucket(server):
    with pytest.raises(RemoteFailed, check=tells_of("s3://bucket/cache/nothing", "'bucket'")) as said:
        client_of(LONG).get("nothing")
    assert said.value.errno == 2
    assert isinstance(said.value, ReadFailed)
    assert len(server.requests) == 1


def test_no_credential_is_in_a_message_a_repr_or_a_pickle(server):
    client = client_of()
    said = [repr(client), str(client.address)]
    for fault in (400, 401, 403, 404, 409, 500, "reset", "cut"):
        server.faults[:] = [fault] * 1000
        with pytest.raises(RemoteFailed) as failed:
            client.get("a")
        error = failed.value
        assert error.__cause__ is None
        assert error.__suppress_context__
        said.append(f"{error} {error!r} {error.args}")
    with pytest.raises(TypeError):
        pickle.dumps(client)
    assert not re.search("AKIDKEY|hush", " ".join(said))


def test_an_answer_that_was_lost_counts_as_taken(server):
    server.faults += ["lost"]
    assert client_of(LONG).put_new("b", b"mine") is False
    assert server.objects["cache/b"] == b"mine"


def test_azures_answer_for_an_object_that_exists_is_no_conflict(server, monkeypatch):
    monkeypatch.setitem(CODES, 409, "BlobAlreadyExists")
    server.faults += [409] * 100
    assert client_of().put_new("b", b"mine") is False


def test_a_client_refuses_to_work_in_a_forked_child(server):
    client = client_of()
    client.get("a")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.get("a")
            words = "it worked"
        except BadInput as error:
            words = str(error)
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "connect in the process that reads" in pipe.read()
    os.waitpid(child, 0)
    assert client.get("a") == b"value"


def test_without_credentials_it_says_so(monkeypatch, server):
    for name in SECRETS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    server.faults += [404] * 100
    with pytest.raises(RemoteFailed, match="no credentials were found; check AWS_ACCESS_KEY_ID"):
        client_of().get("a")


def test_azure_without_an_account_says_what_to_set(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(BadInput, check=tells_of("AZURE_STORAGE_ACCOUNT_NAME")):
        client_of(address="az://container/cache")


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RemoteFailed, match=r"Not a directory|check the folder"):
        client_of(address=f"file://{tmp_path}/file").put_new("a", b"x")


@pytest.mark.parametrize("name", ["get", "get_range", "head"])
def test_a_fifo_in_a_folder_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(RemoteFailed):
        CALLS[name](Client(parse_address("address", f"file://{tmp_path}"), limits=SHORT))
