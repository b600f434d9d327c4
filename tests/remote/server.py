"""A small HTTP server that speaks as much S3 as the client needs: objects, ranges, conditional puts, multipart uploads, pages of keys.

`faults` is a list of what the next requests get instead of an answer: a status, "reset", "cut" (the body ends in its middle), "stall" (no
answer), "lost" (the server acts, then resets), or a function of method, path and the right answer (status, body, headers) that returns
another one. None lets a request pass. `only` restricts it to requests of one method.
"""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ERROR = "<Error><Code>{code}</Code><Message>for AKIDKEY</Message><AWSAccessKeyId>AKIDKEY</AWSAccessKeyId></Error>"
CODES = {403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict", 412: "PreconditionFailed", 503: "SlowDown"}


class Server:
    """One bucket, served."""

    def __init__(self, page=1000):
        self.objects, self.uploads, self.requests, self.faults = {}, {}, [], []
        self.only = None
        self.page = page
        self.lock = threading.Lock()
        self.released = threading.Event()

    def fault(self, method) -> Any:
        with self.lock:
            if not self.faults or self.only not in {None, method}:
                return None
            return self.faults.pop(0)


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # one segment of TCP for headers and body

        def log_message(self, format, *args):  # noqa: A002 - its name there
            pass

        def _serve(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            server.requests.append((self.command, self.path))
            fault = server.fault(self.command)
            if fault == "stall":
                server.released.wait(30)
            if fault in {"stall", "reset"}:
                return self._hang_up()
            if isinstance(fault, int):
                return self._answer(fault, ERROR.format(code=CODES.get(fault, "Wrong")).encode())
            status, answer, headers = self._act(body)
            if fault == "lost":
                return self._hang_up()
            if callable(fault):
                changed: Any = fault(self.command, self.path, status, answer, dict(headers))
                status, answer, headers = changed[0], changed[1], changed[2].items()
            return self._answer(status, answer, headers, is_cut=fault == "cut")

        def _hang_up(self):
            self.close_connection = True
            self.connection.shutdown(2)

        def _answer(self, status, body, headers=(), *, is_cut=False):
            self.send_response(status)
            size = dict(headers).get("Content-Length", len(body))
            for name, value in {
                "Content-Length": size,
                "ETag": '"x"',
                "Last-Modified": "Mon, 23 Nov 2026 17:00:00 GMT",
                **dict(headers),
            }.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if is_cut else body)
            self.wfile.flush()
            if is_cut:
                self._hang_up()

        def _act(self, body):
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
            with server.lock:
                if self.command == "GET" and "list-type" in query:
                    return _listing(server, query)
                if self.command == "POST":
                    return self._post(key, query, body)
                if self.command == "PUT":
                    return self._put(key, query, body)
                if self.command == "DELETE":
                    server.objects.pop(key, None)
                    return 204, b"", ()
                return self._get(key)

        def _put(self, key, query, body):
            if "uploadId" in query:
                server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            elif self.headers.get("if-none-match") == "*" and key in server.objects:
                return 412, ERROR.format(code="PreconditionFailed").encode(), ()
            else:
                server.objects[key] = body
            return 200, b"", ()

        def _post(self, key, query, body):
            if "delete" in query:
                keys = [part.split("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
                for one in keys:
                    server.objects.pop(one, None)
                rows = "".join(f"<Deleted><Key>{one}</Key></Deleted>" for one in keys)
                return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), ()
            if "uploads" in query:
                upload = f"u{len(server.uploads)}"
                server.uploads[upload] = {}
                text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                return 200, text.encode(), ()
            server.objects[key] = b"".join(data for _number, data in sorted(server.uploads.pop(query["uploadId"]).items()))
            return 200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>', ()

        def _get(self, key):
            if key not in server.objects:
                return 404, ERROR.format(code="NoSuchKey").encode(), ()
            data = server.objects[key]
            if asked := self.headers.get("range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                some = data[int(first) : int(last) + 1]
                where = f"bytes {first}-{int(first) + len(some) - 1}/{len(data)}"
                return 206, some, {"Content-Range": where}.items()
            return 200, data, {"Content-Length": len(data)}.items()

    for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
        setattr(Handler, f"do_{method}", Handler._serve)
    return Handler


def _listing(server, query):
    start = query.get("continuation-token") or query.get("start-after") or ""
    keys = sorted(key for key in server.objects if key.startswith(query.get("prefix", "")) and key > start)
    some, more = keys[: server.page], keys[server.page :]
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(server.objects[key])}</Size><ETag>x</ETag>"
        "<LastModified>2026-11-23T17:00:00.000Z</LastModified></Contents>"
        for key in some
    )
    token = f"<NextContinuationToken>{escape(some[-1])}</NextContinuationToken>" if more else ""
    text = f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
    return 200, text.encode(), ()


class _Http(ThreadingHTTPServer):
    request_queue_size = 128  # with the usual 5, the sixth connection at once waits for a second


@contextmanager
def served(*, state=None, port=0, **options):
    """A server in threads of this process, and its URL. With `state` and `port` one that was gone is there again."""
    state = state or Server(**options)
    http = _Http(("127.0.0.1", port), _handler(state))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{http.server_port}"
    finally:
        state.released.set()
        http.shutdown()
        http.server_close()
        thread.join()
