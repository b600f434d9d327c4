"""`export --format webdataset`: writes a data set as tars with a safetensors file, a JSON and a caption for each sample.

Nothing is converted: `import webdataset` makes the same data set of them. The same data set gives the same bytes.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed
from cachestore.core.inputs import IMAGES, caption_key
from cachestore.core.keys import Key
from cachestore.core.raw_tensors import Raw
from cachestore.core.samples import CAPTION
from cachestore.core.spelling import option
from cachestore.core.words import named_prompt
from cachestore.files.paths import encode_name
from cachestore.store.format.catalog import Catalog, Cell, KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.trainers.containers import write_safetensors
from cachestore.trainers.export_target import Target
from cachestore.trainers.table import WEBDATASET
from cachestore.trainers.webdataset.exchange import ExchangedCell, ExchangedColumn, ExchangedSample, file_names, write_sample

TAR_BYTES: Final = 256 << 20
"""A tar gets no further sample once it has this many bytes. It is made in memory, so that it is written whole or not at all."""

Files = Mapping[str, bytes]
"""By suffix: the files of one sample."""


def refuse_given(options: Mapping[str, object]) -> None:
    """Raise BadInput for options of a trainer's format: tars hold a whole data set, and say themselves what is in them."""
    if given := [name for name, value in options.items() if value]:
        named = ", ".join(option("claim" if name == "claims" else name) for name in given)
        raise BadInput(f"{WEBDATASET} tars hold all of a data set and say what it is: leave out {named}", option=given[0])


@dataclass(frozen=True, slots=True)
class TarExport:
    """Writes the samples of a data set as tars."""

    reader: Reader
    catalog: Catalog
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])

    def write(self, target: Target) -> None:
        """Write the tars, and remove those that an earlier export wrote in excess. Raises WriteFailed."""
        name, written = encode_name(self.catalog.name), set[str]()
        for prefix, samples in ((f"{name}-", self._samples()), (f"{name}-texts-", self._texts())):
            for number, data in enumerate(_tars(samples)):
                path = f"{prefix}{number:06d}.tar"
                target.put(path, data)
                target.close()  # at once: if this process dies, the tar is known as an export's
                written.add(path)
        target.drop(re.compile(rf"{re.escape(name)}-(texts-)?\d{{6,}}\.tar"), but=written)
        target.close()

    def _samples(self) -> Iterator[tuple[str, Files]]:
        columns = sorted(self.catalog.columns, key=lambda one: (one.encoder, one.role))
        for row, sample in enumerate(self.catalog.ids):
            cells = [(column, column.row_cells(row)) for column in columns if column.count(row)]
            images = {role: tuple(references) for role, references in self.catalog.row_images(row).items()}
            captions, extras = self.catalog.row_captions(row), json.loads(self.catalog.extras[row])
            draft = ExchangedSample(sample, captions, images, extras, self.catalog.texts, samples=len(self.catalog))
            made = self._files(sample, cells, draft)
            if made is not None:
                yield f"{row:08d}", made

    def _texts(self) -> Iterator[tuple[str, Files]]:
        """Yield name and files of each text that belongs to no sample: the empty caption, and prompts."""
        columns = [column for column in self.catalog.columns if column.role == CAPTION and IMAGES not in column.options]
        prompts = [text for pair in self.catalog.prompts for text in pair]
        for number, text in enumerate(dict.fromkeys(("", *prompts))):
            keys = [(column, caption_key(column.fingerprint, text)) for column in columns]
            cells = [(column, [Cell(key)]) for column, key in keys if text in prompts or key in self.reader]
            draft = ExchangedSample(None, [text], texts=self.catalog.texts, prompts=self.catalog.prompts)
            made = self._files(named_prompt(text) if text else "", cells, draft) if cells and len(self.catalog) else None
            if made is not None:
                yield f"text-{number:06d}", made

    def _files(self, name: str, cells: Sequence[tuple[KeyColumn, Sequence[Cell]]], draft: ExchangedSample) -> Files | None:
        encoder, used, tensors, columns = "", set[str](), dict[str, Raw](), list[ExchangedColumn]()
        try:
            for column, own in cells:
                encoder, recipe = column.encoder, self.catalog.recipes[column.fingerprint]
                made = ExchangedColumn(encoder, column.role, column.options, column.fingerprint, found := [])
                for cell in own:
                    stored = self._stored(cell.key)
                    names = file_names(made, recipe, sorted(stored), used)
                    tensors |= {names[one]: raw for one, raw in stored.items()}
                    assert cell.key is not None
                    found.append(ExchangedCell(cell, names, self.reader.describe(cell.key).meta))
                columns.append(made)
        except (CacheStoreError, OSError) as error:
            self.failures.append({"sample": name, "encoder": encoder, "reason": str(error)})
            return None
        data = write_safetensors(tensors, {})
        recipes = {column.fingerprint: self.catalog.recipes[column.fingerprint] for column in columns}
        whole = replace(draft, columns=columns, recipes=recipes, digest=hashlib.sha256(data).hexdigest())
        caption = {"txt": "\n".join(draft.captions).encode("utf-8", "surrogatepass")} if draft.captions else {}
        return {"json": write_sample(whole), "safetensors": data, **caption}

    def _stored(self, key: Key | None) -> Mapping[str, Raw]:
        if key is None:
            raise EncodeFailed("it was not encoded; `cachestore why STORE SAMPLE` says why")
        return self.reader.get_raw([key])[0]


def _tars(samples: Iterable[tuple[str, Files]]) -> Iterator[bytes]:
    waiting: list[tuple[str, Files]] = []
    size = 0
    for name, files in samples:
        own = sum(map(len, files.values()))
        if waiting and size + own > TAR_BYTES:
            yield _packed(waiting)
            waiting, size = [], 0
        waiting.append((name, files))
        size += own
    if waiting:
        yield _packed(waiting)


def _packed(samples: Iterable[tuple[str, Files]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, files in samples:
            for suffix, data in files.items():
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
