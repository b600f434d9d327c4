"""What a store in an object store holds, by its listing and the headers of its catalogs."""

from dataclasses import asdict, dataclass

from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.remote.address import parse_address
from cachestore.remote.call import call_helper
from cachestore.remote.client import ReadingClient
from cachestore.remote.outline import ask_until_sure, remote_start, require_store, take_inventory


@dataclass(frozen=True, slots=True)
class RemoteCatalog:
    """One generation of a data set in an object store."""

    name: str
    generation: int
    samples: int
    bytes: int
    """Size of the catalog itself."""
    digest: str


@dataclass(frozen=True, slots=True, repr=False)
class RemoteStats:
    """What a store in an object store holds."""

    address: str
    catalogs: tuple[RemoteCatalog, ...]
    segments: int
    bytes: int
    """Size of all segments."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore ls ADDRESS --json` prints."""
        return asdict(self)


def list_address(address: str) -> RemoteStats:
    """Return what is at an address. Raises BadInput, StoreNotFound, FormatError for a damaged catalog, RemoteFailed, MissingExtra."""
    parse_address("address", address)
    found = call_helper("ls", address)
    found["catalogs"] = tuple(RemoteCatalog(**one) for one in found["catalogs"])
    return RemoteStats(**found)


def list_client(client: ReadingClient) -> RemoteStats:
    """`list_address` with a client."""

    def list_all() -> RemoteStats:
        require_store(client)
        inventory = take_inventory(client)
        catalogs: list[RemoteCatalog] = []
        for name, generations in inventory.catalogs.items():
            for generation, size in generations.items():
                start = remote_start(client, name, generation, size)
                catalogs.append(RemoteCatalog(name, generation, start.samples, size, start.digest))
        return RemoteStats(str(client.address), tuple(catalogs), len(inventory.segments), sum(inventory.segments.values()))

    return ask_until_sure(list_all)
