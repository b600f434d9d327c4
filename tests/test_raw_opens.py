"""Files are opened in one place, `files/opening.py`. Whatever else opens one by name stands in a list here, with its reason."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import cachestore
from tests.syntax import nodes_in, nodes_of

PACKAGE = Path(cachestore.__file__).parent

OPENERS = frozenset(
    {
        *("open", "fdopen", "FileIO", "read_bytes", "read_text", "copyfile", "copy2", "copytree", "from_pretrained", "from_single_file"),
        *("ZipFile", "GzipFile", "BZ2File", "LZMAFile", "TarFile", "safe_open", "load_file", "fromfile", "memmap", "mmap", "loadtxt"),
        *("genfromtxt", "imread", "FileLock", "connect", "load", "run_path", "decode_jpeg"),
    }
)
"""The last name of what is called: any of these may open a file by its name, or unpack bytes without a limit."""
OF_SOURCES = frozenset({"files", "_files", "listing", "read"})
"""`open` of these is that of `source.files.Files`, which stands on `open_foreign`."""

_BYTES = "bytes in memory, or a file that `open_foreign` has opened"
_OURS = "a file that this process or its parent made a moment ago, in a folder of its own"
_KERNEL = "a file of the kernel's, under a fixed name"
_WRITES = "it writes, never waits (O_NONBLOCK or O_EXCL) and follows no link, or into a folder of our own"
_FOLDER = "a folder (O_DIRECTORY): a fifo is refused"
_MEMORY = "memory, no file"
_CHECKED = "its path was opened and checked a moment before; the library takes names alone"
_MODEL = "the files of a model's component: `encode.models` refuses a folder with anything else in it, and digests them before"

ALLOWED = {
    ("children/start.py", "os.fdopen"): _MEMORY,
    ("cli/__init__.py", "os.open"): "the null device",
    ("cli/report.py", "webbrowser.open"): "a page that was just written, in the browser",
    ("core/forked.py", "Path('/proc/self/stat').read_bytes"): _KERNEL,
    ("encode/models/conversion.py", "safe_open"): _MODEL,
    ("encode/models/conversion.py", "shutil.copyfile"): _MODEL,
    ("encode/pictures/images.py", "Image.open"): _BYTES,
    ("encode/pictures/images.py", "decode_jpeg"): "bytes whose size Pillow has limited",
    ("encode/pictures/images.py", "image.load"): _BYTES,
    ("encode/pictures/images.py", "simplejpeg.decode_jpeg"): "our own test picture",
    ("encode/models/loaded.py", "path.read_bytes"): _OURS,
    ("encode/models/modules.py", "_class_of(component).from_pretrained"): _MODEL,
    ("encode/models/modules.py", "getattr(transformers, f'{name}Pil', getattr(transformers, name)).from_pretrained"): _MODEL,
    ("encode/models/modules.py", "transformers.AutoConfig.from_pretrained"): _MODEL,
    ("encode/models/processor.py", "image_processor.from_pretrained"): _MODEL,
    ("encode/models/processor.py", "transformers.AutoTokenizer.from_pretrained"): _MODEL,
    ("encode/pictures/videos.py", "av.open"): f"{_BYTES}; it may open nothing else",
    ("files/in_use.py", "os.open"): _WRITES,
    ("files/locks.py", "FileLock"): "it opens for reading and writing, which waits for no fifo; only locks are made of it",
    ("files/locks.py", "os.open"): "it never waits (O_NONBLOCK), and reads nothing",
    ("files/marker.py", "os.open"): _FOLDER,
    ("files/opening.py", "mmap.mmap"): _BYTES,
    ("files/locks.py", "Path('/proc/sys/kernel/random/boot_id').read_text"): _KERNEL,
    ("files/locks.py", "Path(f'/proc/{pid}/stat').read_text"): _KERNEL,
    ("files/opening.py", "os.open"): "here it is done",
    ("files/publish.py", "os.open"): f"{_WRITES}, or it is a folder",
    ("files/removal.py", "os.open"): _FOLDER,
    ("files/stat_record.py", "_MOUNTS.read_text"): _KERNEL,
    ("trainers/containers.py", "zipfile.ZipFile"): "bytes in memory, for the list at their end, which is limited before",
    ("trainers/diffusion_pipe/format.py", "sqlite3.connect"): _CHECKED,
    ("live/shared_count.py", "mmap.mmap"): _MEMORY,
    ("live/named_files.py", "self._files.load_file"): "the store's",
    ("trainers/ai_toolkit/live.py", "PromptEmbeds.load"): "the trainer's own, of a file in the store",
    ("trainers/torch_files.py", "gzip.GzipFile"): "bytes in memory, unpacked up to a limit in a limited process",
    ("trainers/torch_files.py", "torch.load"): "bytes in memory, in a limited process",
    ("trainers/pickle_reader.py", "open"): _KERNEL,
    ("trainers/webdataset/exporting.py", "tarfile.open"): _MEMORY,
    ("jobs/start/processes.py", "_VMSTAT.read_text"): _KERNEL,
    ("jobs/start/ranks.py", "Path(f'/proc/{pid}/stat').read_text"): _KERNEL,
    ("train/epoch.py", "mmap.mmap"): _MEMORY,
    ("care/bench_samples.py", "self.path.read_bytes"): _OURS,
    ("care/doctor.py", "Path('/proc/self/mounts').read_text"): _KERNEL,
    ("care/doctor.py", "one.open"): _OURS,
    ("care/doctor.py", "one.read_bytes"): _OURS,
    ("care/doctor.py", "other.read_bytes"): _OURS,
    ("care/proof.py", "Image.open"): _BYTES,
    ("live/npz.py", "files.load"): "the store's",
    ("live/npz.py", "self.own.load"): "a trainer's own cache files, as it opens them itself",
    ("remote/reading_helper.py", "os.open"): _WRITES,
    ("remote/parts.py", "os.open"): _WRITES,
    ("remote/push.py", "outline.index(index).open"): _WRITES,
    ("sources/captions.py", "read_text"): "our own, which stands on `read_foreign`",
    ("sources/memory.py", "Folder(Path.cwd()).open"): "that of `source.files.Files`",
    ("sources/memory.py", "path.open"): _WRITES,
    ("sources/prompts.py", "read_text"): "our own, which stands on `read_foreign`",
    ("sources/tables.py", "read_text"): "our own, which stands on `read_foreign`",
    ("sources/tars.py", "tarfile.open"): f"{_BYTES}; a header of more than 1 MiB is refused",
    ("store/read/fetch.py", "mmap.mmap"): f"{_MEMORY}, or {_BYTES}",
    ("remote/fetch_parts.py", "os.open"): "it never waits (O_NONBLOCK), follows no link, and reads at offsets, which a fifo refuses",
    ("store/format/index.py", "lmdb.open"): _CHECKED,
    ("store/format/segment.py", "mmap.mmap"): _MEMORY,
    ("remote/outline.py", "path.open"): _WRITES,
    ("remote/reader.py", "RemoteReader.open"): "a reader",
    ("remote/reader.py", "cache.open"): "a local cache, whose files are opened by `files.opening`",
    ("train/encoding/dataset.py", "state.joined.open"): "rows of a data set",
    ("jobs/share/workers.py", "Path('/proc/sys/kernel/random/boot_id').read_text"): _KERNEL,
}


def openings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every call in a file that may open one, as it is written."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        last = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if last in OPENERS:
            call = ast.unparse(node.func)
            if not (last == "open" and call.rpartition(".")[0].rpartition(".")[2] in OF_SOURCES):
                yield call


def test_nothing_but_one_module_opens_files_by_name():
    found = {(str(path.relative_to(PACKAGE)), call) for path in PACKAGE.rglob("*.py") for call in openings(nodes_in(path))}
    assert found == set(ALLOWED), "open files by `open_foreign` or `open_regular`; what cannot needs a reason here"


@pytest.mark.parametrize(
    "line",
    [
        "open(name)",
        "with Path(name).open('rb') as file: pass",
        "path.read_bytes()",
        "self.folder.joinpath('a').read_text(encoding='utf-8')",
        "np.load(path)",
        "Image.open(path)",
        "av.open(str(path))",
        "zipfile.ZipFile(path)",
        "json.load(opened)",
        "torch.load(path)",
        "os.open(path, os.O_RDONLY)",
        "mmap.mmap(descriptor, 0)",
        "safe_open(path, 'np')",
    ],
)
def test_a_raw_opening_is_found(line):
    assert len(list(openings(nodes_of(line)))) == 1


@pytest.mark.parametrize("line", ["self.files.open(reference)", "listing.open(reference)", "opened(path)", "open_foreign(path)"])
def test_an_opening_through_the_one_module_is_not(line):
    assert list(openings(nodes_of(line))) == []
