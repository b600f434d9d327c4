"""Opens the files of another trainer's cache, one at a time, and checks what is in them. No size or shape that they state is trusted."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Contents, Latents, Misplaced, Text, is_finite
from cachestore.files.opening import open_foreign
from cachestore.trainers.containers import LARGEST_BYTES, read_npz, read_safetensors
from cachestore.trainers.families import Family
from cachestore.trainers.format import Format
from cachestore.trainers.matching import FileLocation
from cachestore.trainers.sandbox import TorchFiles
from cachestore.trainers.text import check_widths

_Value = TypeVar("_Value", Latents, Text)


@dataclass(frozen=True, slots=True)
class CacheFiles:
    """The files of a cache, opened one at a time."""

    root: Path
    format: Format
    torch: TorchFiles

    def latents(self, location: FileLocation, data: bytes, family: Family) -> Latents:
        """Return the latents of a picture. Raises OSError, and EncodeFailed that names the file."""
        return self._read(self.format.reading.latents, location, data, family)

    def text(self, location: FileLocation, family: Family) -> Text:
        """Return the text of a caption. Raises as `latents`."""
        return self._read(self.format.reading.text, location, self.bytes_at(location), family)

    def _read(
        self, read: Callable[[Contents, Family, FileLocation], _Value], location: FileLocation, data: bytes, family: Family
    ) -> _Value:
        """Read latents or text; check widths and for NaN. Names of extra tensors get the trainer's name in front."""
        try:
            found = read(self._contents(location, data), family, location)
            if isinstance(found, Text):
                check_widths(family, found.tensors)
        except Misplaced as error:
            raise Misplaced(f"{location.path}: {error}") from error
        except EncodeFailed as error:
            raise EncodeFailed(f"{location.path}: {error}; {self._mend}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a file may hold any shapes and values
            fault = f"it is not as {self.format.name} writes it ({type(error).__name__}: {error})"
            raise EncodeFailed(f"{location.path}: {fault}; {self._mend}") from error
        tensors = found.tensors if isinstance(found, Text) else {"latents": found.tensor}
        if bad := [name for name, raw in tensors.items() if not is_finite(raw)]:
            raise EncodeFailed(f"{location.path}: {bad[0]} holds NaN or infinite numbers; {self._mend}")
        return replace(found, others=self.format.trainer.marked(found.others))

    @property
    def _mend(self) -> str:
        return f"let {self.format.name} make it again, or encode it with `cachestore precompute`"

    def read(self, location: FileLocation) -> Contents:
        """Return what is at a file location, by the trainer's own names. Raises EncodeFailed, OSError."""
        return self._contents(location, self.bytes_at(location))

    def _contents(self, location: FileLocation, data: bytes) -> Contents:
        parts = [self._decoded(data), *(self._decoded(self.bytes_at(other)) for other in location.more)]
        tensors = {name: raw for part in reversed(parts) for name, raw in part.tensors.items()}
        return Contents(tensors, {name: value for part in reversed(parts) for name, value in part.values.items()})

    def _decoded(self, data: bytes) -> Contents:
        match self.format.container:
            case "npz":
                return read_npz(data)
            case "safetensors":
                return read_safetensors(data)
            case "torch":
                return self.torch.read(data)

    def bytes_at(self, location: FileLocation) -> bytes:
        """Return the bytes at a file location. Raises OSError, also for no regular file; EncodeFailed if it is too large or cut short."""
        with open_foreign(self.root / location.path) as file:
            length = os.fstat(file.fileno()).st_size
            size = length if location.size is None else location.size
            if size > LARGEST_BYTES or location.start + size > length:
                raise EncodeFailed(
                    f"{location.path}: it should have {size} bytes from byte {location.start} on, which is more than the file has, or"
                    f" than a value may have; {self._mend}"
                )
            file.seek(location.start)
            return file.read(size)
