"""The client of an object store: six verbs, with retries. The only module that imports obstore.

A request is tried again if the server is busy (409, 429, 5xx), resets the connection or does not answer. The pauses are random and grow,
and `ClientLimits` ends all of it. What the server refuses (401, 403, 404, other 4xx) raises at once. Every error is a RemoteFailed that
names the object and what to check. Of the server's own text it shows the error code only: the rest may hold credentials.

A client is for one process. It refuses to work in a forked child, where the client's threads are gone, and it cannot be pickled. Any
thread may call it.
"""

import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

from cachestore.core.errors import BadInput, CacheStoreError, RemoteFailed, naming_extras
from cachestore.remote.address import Address

PIECE_BYTES: Final = 8 * 1024 * 1024
"""The most that one request moves; larger objects go up and come down in such pieces."""
PAGE: Final = 1000
"""Keys in one answer to LIST."""

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_WITHOUT_CREDENTIALS: Final = re.compile(r"/latest/api/token|/latest/meta-data|/computeMetadata/|/metadata/identity|token request")
"""Addresses of a cloud's own machines, which are asked for credentials if the environment has none."""
_SYSTEM: Final = re.compile(r"\(os error (\d+)\)")
_BUSY: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 509, 529})

T = TypeVar("T")


class ClientLimits(NamedTuple):
    """How long a client waits."""

    request_seconds: float = 60.0
    """For one answer."""
    retry_seconds: float = 60.0
    """After so many seconds since the first try, no new one begins."""

    @property
    def longest_seconds(self) -> float:
        """After so many seconds without an answer a request has failed: the last try may begin, and be repeated, just before."""
        return self.retry_seconds + self.retry_seconds / 2 + self.request_seconds


class ObjectRef(NamedTuple):
    """An object in a listing."""

    key: str
    size: int


class Readable(Protocol):
    """A file that is uploaded. It is read again from its start if the upload fails."""

    def seek(self, position: int, /) -> int:
        """Set where the next `read` begins."""
        ...

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes; all that follow if `size` is negative."""
        ...


class ReadingClient(Protocol):
    """One store in an object store, for reading.

    Keys are paths within that store. All errors are RemoteFailed; a missing object has `errno` ENOENT.
    """

    @property
    def address(self) -> Address:
        """Where the store is."""
        ...

    def list(self, folder: str = "") -> Iterator[list[ObjectRef]]:
        """Yield all objects below a folder, page by page."""
        ...

    def get(self, key: str) -> bytes:
        """Return a small object."""
        ...

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on; fewer only at the object's end."""
        ...


class _Failure(NamedTuple):
    """What an error of obstore says, without the server's text."""

    status: int = 0
    """The HTTP status; 0 if there was no answer, or no HTTP."""
    code: str = ""
    """The server's word, such as NoSuchBucket."""
    errno: int = 0
    """Of the operating system, for file://."""
    is_redirect: bool = False
    has_credentials: bool = True

    @property
    def may_pass(self) -> bool:
        """Whether trying again may help."""
        return self.has_credentials and not self.is_redirect and not self.errno and (self.status in _BUSY or not self.status)

    @property
    def is_missing(self) -> bool:
        return self.status == 404 or self.errno in {2, 20}

    @property
    def words(self) -> str:
        """The server's answer in short."""
        if self.errno:
            return os.strerror(self.errno)
        return " ".join(filter(None, (str(self.status or "no answer"), self.code)))


class Client:
    """One store in an object store, for reading and writing: a `ReadingClient` over obstore. Sends nothing until it is asked.

    Raises MissingExtra without the extra [objects], BadInput for wrong settings.
    """

    def __init__(self, address: Address, *, limits: ClientLimits = ClientLimits()) -> None:  # noqa: B008 - immutable
        self.address = address
        self._limits = limits
        self._pid = os.getpid()
        with naming_extras():
            import obstore
        self._obstore: Any = obstore
        self._store = _store_of(address, limits)

    def __repr__(self) -> str:
        return f"<client of {self.address}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the client of {self.address} cannot be pickled: connect again in the other process")

    def list(self, folder: str = "") -> Iterator[list[ObjectRef]]:
        """As `ReadingClient.list`."""
        above = self.address.key(folder)
        skip = len(self.address.prefix) + 1 if self.address.prefix else 0
        pages: Iterator[Any] | None = None
        last: str | None = None

        def next_page() -> Any:
            nonlocal pages
            if pages is None:  # at first, and after a failure: it goes on behind the last key
                pages = iter(self._obstore.list(self._store, f"{above}/" if above else None, offset=last, chunk_size=PAGE))
            try:
                return next(pages, None)
            except self._obstore.exceptions.BaseError:
                pages = None  # it would end here as if there were no more keys
                raise

        while page := self._call("list", folder, next_page):
            last = page[-1]["path"]
            yield [ObjectRef(item["path"][skip:], item["size"]) for item in page]

    def head(self, key: str) -> int | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            return self._call("look up", key, lambda: self._obstore.head(self._store, self._readable(key))["size"])
        except RemoteFailed as error:
            if error.errno == 2:
                return None
            raise

    def get(self, key: str) -> bytes:
        """As `ReadingClient.get`."""
        return self._call("read", key, lambda: bytes(self._obstore.get(self._store, self._readable(key)).bytes()))

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """As `ReadingClient.get_range`."""
        if size == 0:  # HTTP has no empty range
            return b""

        def read() -> bytes:
            try:
                return bytes(self._obstore.get_range(self._store, self._readable(key), start=start, length=size))
            except self._obstore.exceptions.BaseError as error:
                if _failure_of(error).status == 416:  # the object ends before it
                    return b""
                raise

        return self._call("read", key, read)

    def _readable(self, key: str) -> str:
        whole = self.address.key(key)
        if self.address.scheme == "file":
            kind = stat.S_IFREG
            with suppress(OSError):  # there is nothing, and obstore says why
                kind = stat.S_IFMT(Path("/", whole).stat().st_mode)
            if kind not in {stat.S_IFREG, stat.S_IFDIR}:  # reading would wait
                raise RemoteFailed(f"{self.address.of(key)} is a fifo, a socket or a device, not a regular file: move it away")
        return whole

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object, complete when visible. Returns False if one exists already.

        That may be this call's own, if the answer to an earlier try of it was lost: compare the contents where it matters.
        """

        def create() -> bool:
            try:
                self._obstore.put(self._store, self.address.key(key), data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                failure = _failure_of(error)
                if failure.status == 409 and failure.code != "BlobAlreadyExists":  # two requests met; which one won is not known yet
                    raise
                return False
            return True

        return self._call("write", key, create)

    def put(self, key: str, file: Readable, size: int) -> None:
        """Upload a file of this size from its start, replacing an object of that key. Holds `PIECE_BYTES` of it at a time in memory."""

        def upload() -> None:
            file.seek(0)
            whole = self.address.key(key)
            if size <= PIECE_BYTES:
                self._obstore.put(self._store, whole, file.read(), use_multipart=False)
                return
            reading = _Reading(file)
            try:
                self._obstore.put(self._store, whole, reading, use_multipart=True, chunk_size=PIECE_BYTES, max_concurrency=1)
            except Exception:
                if reading.error is not None:  # obstore hides it behind an error of its own
                    raise reading.error from None
                raise

        self._call("write", key, upload)

    def _call(self, verb: str, key: str, act: Callable[[], T]) -> T:
        if os.getpid() != self._pid:
            raise BadInput(
                f"the client of {self.address} was made in process {self._pid}, and this is its forked child, where it cannot work:"
                " connect in the process that reads"
            )
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                return act()
            except (self._obstore.exceptions.BaseError, OSError) as error:
                if isinstance(error, CacheStoreError) or (isinstance(error, OSError) and error.errno):  # of the file that is uploaded
                    raise
                failure = _failure_of(error)
                seconds = time.monotonic() - began
                if not failure.may_pass or seconds >= self._limits.retry_seconds:
                    raise _error_of(
                        f"{verb} {self.address.of(key)}", self.address, failure, tries, seconds
                    ) from None  # its text may hold credentials
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries)))


class _Reading:
    """A file that obstore reads. It remembers what reading raised."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.error: BaseException | None = None

    def seek(self, position: int) -> int:  # obstore takes only what has this for a file
        return self._file.seek(position)

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except BaseException as error:
            self.error = error
            raise


def _store_of(address: Address, limits: ClientLimits) -> Any:
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

    if address.scheme == "file":
        return LocalStore()
    kind = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[address.scheme]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "" if address.scheme == "s3" else ""
    options: dict[str, Any] = {"config": {"endpoint": endpoint}} if endpoint else {}
    seconds = timedelta(seconds=limits.request_seconds)
    connecting: Any = {"timeout": seconds, "connect_timeout": min(seconds, timedelta(seconds=10))}
    if endpoint.startswith("http://"):
        connecting["allow_http"] = True
    # The parts of a large upload are tried again one by one. Everything else is tried again by `_call` too.
    retries: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=limits.retry_seconds / 2)}
    try:
        return kind(address.bucket, client_options=connecting, retry_config=retries, **options)
    except (exceptions.BaseError, ValueError) as error:
        needs = " (set AZURE_STORAGE_ACCOUNT_NAME)" if "Account must be specified" in str(error) else ""
        raise BadInput(
            f"the settings in the environment for {address.scheme}:// cannot be used{needs}: {_SETTINGS[address.scheme]}"
        ) from None


_SETTINGS: Final = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL in the environment",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS in the environment",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY in the environment",
    "file": "check the folder's permissions",
}


def _failure_of(error: Exception) -> _Failure:
    text = str(error)
    status, code, system = _STATUS.search(text), _CODE.search(text), _SYSTEM.search(text)
    lacks = _WITHOUT_CREDENTIALS.search(text) is not None
    redirect = "redirect without LOCATION" in text or (status is not None and status[1] in {"301", "307"})
    return _Failure(
        int(status[1]) if status else 0, code[1] if code else "", int(system[1]) if system and not status else 0, redirect, not lacks
    )


def _error_of(what: str, address: Address, failure: _Failure, tries: int, seconds: float) -> RemoteFailed:
    settings, bucket = _SETTINGS[address.scheme], f" of the bucket {address.bucket!r}" if address.bucket else ""
    if not failure.has_credentials:
        help_text = f"no credentials were found; {settings}"
    elif failure.status in {401, 403}:
        help_text = f"the server refuses it ({failure.words}); {settings}, and the permissions{bucket}"
    elif failure.is_redirect:
        help_text = f"the bucket is in another region or behind another endpoint; {settings}"
    elif failure.is_missing:
        there = f"no such object or no bucket {address.bucket!r}" if address.bucket else "no such file"
        help_text = f"there is {there} ({failure.words}); check the address" + (", and the endpoint in the environment" if bucket else "")
    elif failure.may_pass:
        answers = f"{tries} tries in {seconds:.0f} s, the last one: {failure.words}"
        help_text = f"the server did not do it ({answers}); run the same command again when it answers: it continues from here"
    else:
        help_text = f"the answer was {failure.words}; {settings}"
    failed = RemoteFailed(f"cannot {what}: {help_text}")
    failed.errno = 2 if failure.is_missing else failure.errno or None
    return failed
