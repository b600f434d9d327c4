"""SeaweedFS, a real S3 server, for slow tests."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 60


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _answers(url, method="GET"):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


@contextmanager
def seaweed(folder):
    """SeaweedFS with an empty bucket: the variables that lead there. Skips the test where it is not installed."""
    program = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip("SeaweedFS is not installed: it is in the dependency group `servers`")
    (folder / "s3.json").write_text(
        '{"identities": [{"name": "a", "credentials": [{"accessKey": "key", "secretKey": "secret"}],'
        ' "actions": ["Admin", "Read", "Write", "List"]}]}'
    )
    ports = dict(zip(("master", "volume", "filer", "s3"), (_free_port() for _ in range(4)), strict=True))
    command = [program, "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={folder}/s3.json"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={_free_port()}" for name in ports]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + SECONDS
        url, bucket = f"http://127.0.0.1:{ports['s3']}", f"http://127.0.0.1:{ports['filer']}/buckets/bucket/"
        while not (_answers(f"{url}/") and _answers(bucket, "POST")):
            assert time.monotonic() < until, (folder / "log").read_text()[-2000:]
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    finally:
        server.kill()  # it takes 20 s to end by itself
        server.wait()
