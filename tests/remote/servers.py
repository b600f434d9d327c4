"""Real servers for slow tests: SeaweedFS (S3) and Azurite (Azure). A test is skipped where its server is not installed."""

import base64
import hashlib
import hmac
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
AZURITE = ("devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
"""The account and key that every Azurite has, as its documentation says."""


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
def _serving(command, folder, is_ready):
    """Run a server in a folder of its own, from when it is ready to the end of the block."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + SECONDS
        while not is_ready():
            assert time.monotonic() < until, (folder / "log").read_text()[-2000:]
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield
    finally:
        server.kill()  # SeaweedFS takes 20 s to end by itself
        server.wait()


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
    url, bucket = f"http://127.0.0.1:{ports['s3']}", f"http://127.0.0.1:{ports['filer']}/buckets/bucket/"
    with _serving(command, folder, lambda: _answers(f"{url}/") and _answers(bucket, "POST")):
        yield {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def azurite(folder):
    """Azurite with an empty container: the variables that lead there."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed: run `npm install -g azurite`")
    port = _free_port()
    command = [program, f"--location={folder}", "--blobHost=127.0.0.1", f"--blobPort={port}", "--skipApiVersionCheck", "--disableTelemetry"]
    url = f"http://127.0.0.1:{port}"
    with _serving(command, folder, lambda: _answers(url)):
        _make_container(url)
        yield {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}


def _make_container(url):
    account, key = AZURITE
    date, version = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()), "2021-12-02"
    signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/container\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(key), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{account}/container?restype=container", method="PUT", headers=headers)):
        pass
