"""The name of a value where a trainer expects a cache file's path: a text that knows its key, and arms the process that unpickles it."""

from typing import TYPE_CHECKING, Any

from cachestore.core.keys import Key
from cachestore.live.arming import Setting, arm, armed

if TYPE_CHECKING:
    from typing_extensions import Self


class ValueName(str):
    """A text for the trainer, with the key of a value in the store. Equal texts with other keys are other values."""

    __slots__ = ("key",)
    key: Key

    def __new__(cls, key: Key, text: str = "") -> "Self":
        """`text` is what the trainer sees, such as the path that its own cache file would have; the key if it is left out."""
        self = super().__new__(cls, text or str(key))
        self.key = key
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) and (not isinstance(other, ValueName) or self.key == other.key)

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_name, (armed(), self.key, str(self))


def _read_name(setting: Setting | None, key: Key, text: str) -> ValueName:
    if setting is not None:
        arm(setting, is_first=False)
    return ValueName(key, text)
