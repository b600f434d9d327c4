"""An object store in memory, and clients of it that can fail or die at any call. Knows neither obstore nor HTTP."""

import threading
from collections.abc import MutableMapping
from typing import Any

from cachestore.core.errors import RemoteFailed
from cachestore.remote.address import parse_address
from cachestore.remote.client import Client, ObjectRef


class Killed(BaseException):
    """The process of a client died here: no code of ours may catch it."""


class Bucket:
    """Objects by key, for any number of clients in any threads."""

    def __init__(self, objects: MutableMapping[str, bytes] | None = None):
        self.objects: MutableMapping[str, bytes] = {} if objects is None else objects
        self.lock = threading.Lock()

    def client(self, address="s3://bucket/cache", **options):
        return FakeClient(self, parse_address("address", address), **options)


class FakeClient(Client):
    """`cachestore.remote.client.Client` over a Bucket.

    `before(verb, key)` is called before each request, `after(verb, key)` when the bucket has acted but the caller does not know yet. Either
    may raise. After a Killed, every later request of this client raises Killed too.
    """

    def __init__(self, bucket, address, *, before=None, after=None, page=1000):
        self.bucket, self.address = bucket, address
        self.before, self.after = before or (lambda verb, key: None), after or (lambda verb, key: None)
        self.page = page
        self.calls = []
        self._is_dead = False

    def _act(self, verb, key, act):
        if self._is_dead:
            raise Killed
        self.calls.append((verb, key))
        try:
            self.before(verb, key)
            with self.bucket.lock:
                found = act(self.bucket.objects, self.address.key(key))
            self.after(verb, key)
        except Killed:
            self._is_dead = True
            raise
        return found

    def list(self, folder=""):
        above, start, last = self.address.key(folder), len(self.address.key("x")) - 1, ""
        while True:

            def some(objects, _key, last=last):
                keys = sorted(key for key in objects if key > last and (not above or key.startswith(f"{above}/")))[: self.page]
                return [(key, len(objects[key])) for key in keys]

            found: Any = self._act("list", folder, some)
            if not found:
                return
            last = found[-1][0]
            yield [ObjectRef(key[start:], size) for key, size in found]
            if len(found) < self.page:
                return

    def head(self, key):
        return self._act("head", key, lambda objects, name: len(objects[name]) if name in objects else None)

    def get(self, key):
        return self._act("get", key, self._there)

    def get_range(self, key, start, size):
        return self._act("get_range", key, lambda objects, name: self._there(objects, name)[start : start + size])

    def put_new(self, key, data):
        def create(objects, name):
            is_new = name not in objects
            if is_new:
                objects[name] = bytes(data)
            return is_new

        return self._act("put_new", key, create)

    def put(self, key, file, size):
        file.seek(0)
        data = file.read()
        assert len(data) == size
        self._act("put", key, lambda objects, name: objects.update({name: data}))

    def _there(self, objects, name):
        if name not in objects:
            failed = RemoteFailed(f"cannot read {name}: there is no such object")
            failed.errno = 2
            raise failed
        return objects[name]
