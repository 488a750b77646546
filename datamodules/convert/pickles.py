"""Read the pickles of CIFAR's archives without running anything they say.

A pickle may name any function of any module and have it called. Here the few names that numpy arrays need stand for
classes of this file that only keep what they are given; every other name is refused. Not even numpy's own functions are
called with the file's arguments: an array is made at the end, by ``frombuffer`` of checked bytes.
"""

import io
import pickle
from typing import TYPE_CHECKING, Any

from lapbench.datamodules.convert.formats import shorten
from lapbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def load_batch(content: bytes, place: str) -> dict[str, Any]:
    """The dictionary in ``content``: keys as str, byte arrays as uint8 arrays, other values as they are.

    Raises:
        UserError: the pickle names a global that no batch needs, is damaged, or is no dictionary.
    """
    try:
        value = _Unpickler(io.BytesIO(content), place).load()
        if not isinstance(value, dict):
            raise UserError(f"{place}: expected a pickled dictionary, got {type(value).__name__}")
        return {_text(key): item.array() if isinstance(item, _Array) else item for key, item in value.items()}
    except _DAMAGE as error:
        raise UserError(
            f"{place} is no readable batch: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _text(key: Any) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else str(key)


# What the standard unpickler raises on bytes that are no pickle, and the classes below on values that do not fit.
_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _DType:
    """Stands for ``numpy.dtype``: keeps the name."""

    def __init__(self, name: Any = None, *rest: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: nothing that matters to single bytes."""


class _Array:
    """Stands for ``numpy.ndarray``: keeps shape, type, order and bytes."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, *self_state = state
        self.state = tuple(self_state)

    def array(self) -> "NDArray[np.uint8]":
        """The array, which must be of bytes in C order."""
        import numpy as np

        shape, dtype, fortran, data = self.state
        if not isinstance(dtype, _DType) or dtype.name not in ("u1", "|u1", "uint8"):
            raise ValueError(f"expected an array of uint8, got {shorten(getattr(dtype, 'name', dtype))}")
        if fortran:
            raise ValueError("expected an array in C order")
        return np.frombuffer(bytes(data), dtype=np.uint8).reshape(tuple(int(size) for size in shape))


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.state = (shape, dtype, order != "C", data)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    """Stands for ``_codecs.encode``, by which protocol 2 writes bytes."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"expected bytes written as latin1, got {shorten(encoding)}")
    return text if isinstance(text, bytes) else str(text).encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, place: str) -> None:
        super().__init__(stream, encoding="bytes")  # the archives were written by Python 2
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise UserError(
                f"{self._place}: the pickle asks for {shorten(f'{module}.{name}')}, which no CIFAR batch needs: "
                "refused, do not trust this file"
            )
        return _STAND_INS[module, name]
