"""The digest of everything that determines a kernel's machine code: the bytecode of all functions compiled into it, and the constants they use.

Owns the walk from a function to the helpers, instructions and values that it refers to. Docstrings, comments, line numbers, and everything in a
file that the kernel does not use are ignored. An object that the walk cannot describe is an error, because with an incomplete digest, stale code
could be loaded from the cache.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import llvmlite
import llvmlite.ir
import numba
import numba.core.types
import numba.extending
import numpy as np

_ir: Any = llvmlite.ir  # untyped
_numba: Any = numba  # untyped

# The code of these changes only with their version, which is part of the digest.
_LIBRARIES: Final = frozenset({"numba", "llvmlite", "numpy", *sys.stdlib_module_names, *sys.builtin_module_names})
VERSIONS: Final = f"python {sys.hexversion:x} numba {numba.__version__} llvmlite {llvmlite.__version__} numpy {np.__version__}"
_HAS_DOCSTRING: Final = 0x4000000  # a flag of code since Python 3.13
_CONSTANT_OPS: Final = frozenset(dis.hasconst)
_EXTENDED_ARG, _IMPORT_NAME = dis.opmap["EXTENDED_ARG"], dis.opmap["IMPORT_NAME"]
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))

_implementations: dict[Any, list[Callable[..., Any]]] = {}  # the functions that generate code for each stub that kernels call
_codes: dict[int, _Code] = {}  # by id of the code object, which each entry keeps alive, so that no id is reused


class UnseenError(Exception):
    """The walk met something that it cannot describe."""


class _Code(NamedTuple):
    """A code object: its instructions, with constants replaced by their number in order of use; the constants; and the names that it looks up."""

    code: CodeType
    text: bytes
    constants: tuple[Any, ...]
    names: tuple[str, ...]


def implemented_by(stub: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Note that ``function`` generates the code for calls of ``stub`` in kernels."""
    _implementations.setdefault(stub, []).append(function)


def fingerprint(function: Callable[..., Any]) -> str:
    """The digest of everything that determines the machine code of ``function``, except its signature and the processor.

    Raises UnseenError, which names the object that cannot be described."""
    digest, found, numbers = hashlib.sha256(VERSIONS.encode()), [function], {id(function): 0}
    for one in found:  # grows
        references: list[Any] = []
        digest.update(_function(one, references))
        for reference in references:
            if id(reference) not in numbers:
                numbers[id(reference)] = len(found)
                found.append(reference)
            digest.update(b"%d " % numbers[id(reference)])
    return digest.hexdigest()


def _function(function: Any, references: list[Any]) -> bytes:
    """The description of a function itself. The objects that it refers to are added to ``references``."""
    if not isinstance(function, FunctionType):
        raise UnseenError(f"{function!r}, which is no function")
    texts: list[bytes] = []
    names = dict.fromkeys(_add_code(function.__code__, texts, references))
    scope, modules = function.__globals__, []
    for name in names:
        if name in scope:
            texts.append(b"%s = %s" % (name.encode(), _value(scope[name], references)))
            if isinstance(scope[name], ModuleType) and not _of_library(scope[name].__name__):
                modules.append(scope[name])
        elif name in vars(builtins):
            texts.append(b"built in " + name.encode())
    for module in modules:  # the attributes that the code reads from them are among the names
        for name in names:
            if hasattr(module, name):
                texts.append(b"%s.%s = %s" % (module.__name__.encode(), name.encode(), _value(getattr(module, name), references)))
    for cell in function.__closure__ or ():
        try:
            texts.append(_value(cell.cell_contents, references))
        except ValueError:  # not filled yet
            texts.append(b"empty")
    texts.append(_value((function.__defaults__, function.__kwdefaults__), references))
    for implementation in _implementations.get(function, ()):
        texts.append(_value(implementation, references))
    return _joined(texts)


def _add_code(code: CodeType, texts: list[bytes], references: list[Any]) -> list[str]:
    """Add the code object and those nested in it to ``texts``. Returns the names that they look up."""
    read = _codes.get(id(code))
    if read is None:
        read = _codes[id(code)] = _read_code(code)
    texts.append(read.text)
    names = list(read.names)
    for constant in read.constants:
        if isinstance(constant, CodeType):
            names += _add_code(constant, texts, references)
        else:
            texts.append(_value(constant, references))
    return names


def _read_code(code: CodeType) -> _Code:
    constants: dict[int, int] = {}  # index -> order of first use; a docstring is never used
    instructions, extended, argument_above = bytearray(), bytearray(), 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if op == _IMPORT_NAME:
            raise UnseenError(f"an import within {code.co_name}")
        if op == _EXTENDED_ARG:
            extended += bytes((op, low))
            argument_above = (argument_above | low) << 8
            continue
        if op in _CONSTANT_OPS:
            number = constants.setdefault(argument_above | low, len(constants))
            instructions += b"%c%d;" % (op, number)
        else:
            instructions += extended + bytes((op, low))
        extended, argument_above = bytearray(), 0
    frame = (
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING, code.co_names, code.co_varnames,
        code.co_freevars, code.co_cellvars, getattr(code, "co_exceptiontable", b""),
    )  # fmt: skip
    return _Code(code, _joined([repr(frame).encode(), bytes(instructions)]), tuple(code.co_consts[i] for i in constants), code.co_names)


def _joined(texts: list[bytes]) -> bytes:
    """The texts joined with their lengths, so that different lists give different results."""
    return b"".join(b"%d:%s" % (len(text), text) for text in texts)


def _value(value: Any, references: list[Any]) -> bytes:
    """The description of a constant, or a number for an object that is added to ``references``."""
    kind = type(value)
    if kind in _PLAIN:
        return f"{kind.__name__} {value!r}".encode()
    if kind is FunctionType or isinstance(value, _numba.core.dispatcher.Dispatcher):
        return _callable(value, references)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}".encode()
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise UnseenError(f"an array of objects {value!r}")
        return _joined([b"array", str(value.dtype).encode(), repr((value.shape, value.strides)).encode(), value.tobytes()])
    if isinstance(value, tuple | list):
        return _joined([_type(kind), *(_value(item, references) for item in value)])
    if isinstance(value, dict):
        return _joined([b"dict", *(_value(item, references) for pair in value.items() for item in pair)])
    if isinstance(value, set | frozenset):
        return _joined([b"set", *sorted(_value(item, references) for item in value)])
    if isinstance(value, type):
        return _type(value)
    if dataclasses.is_dataclass(value):
        fields = [_value(getattr(value, field.name), references) for field in dataclasses.fields(value)]
        return _joined([_type(kind), *fields])
    return _callable(value, references)


def _callable(value: Any, references: list[Any]) -> bytes:
    if isinstance(value, FunctionType):
        if value.__closure__ or not _of_library(value.__module__):
            references.append(value)
            return b"function"
    elif isinstance(value, functools.partial):
        return _joined([b"partial", _value((value.func, value.args, value.keywords), references)])
    elif isinstance(value, MethodType):
        return _joined([b"method", _value((value.__self__, value.__func__), references)])
    elif isinstance(value, _numba.core.dispatcher.Dispatcher):
        return _joined([b"compiled", _value(dict(value.targetoptions), references), _value(value.py_func, references)])
    elif isinstance(value, _numba.extending._Intrinsic):
        return _joined([b"instruction", _value((value._prefer_literal, value._defn), references)])
    elif isinstance(value, _numba.core.types.Type | _ir.Type | _ir.Constant | np.dtype) and " at 0x" not in str(value):
        return f"{type(value).__qualname__} {value}".encode()
    elif isinstance(value, functools._lru_cache_wrapper):
        return _joined([b"cached", _value(value.__wrapped__, references)])
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name and _of_library(type(value).__module__) and _of_library(getattr(value, "__module__", None) or "builtins"):
        owner = value.__self__ if isinstance(value, BuiltinFunctionType) else None
        if owner is None or isinstance(owner, ModuleType):
            return f"library {value.__module__} {name}".encode()
    raise UnseenError(f"{value!r}, of {type(value).__module__}.{type(value).__qualname__}")


def _type(kind: type) -> bytes:
    """A class: by name if it is a library's, else with the source of its module, because its methods may use any of it."""
    name = f"class {kind.__module__}.{kind.__qualname__}".encode()
    return name if _of_library(kind.__module__) else _joined([name, _module_text(kind.__module__)])


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


@functools.cache
def _module_text(name: str) -> bytes:
    """The module's source, without comments and docstrings."""
    try:
        tree = ast.parse(Path(inspect.getfile(sys.modules[name])).read_text())
    except (KeyError, TypeError, OSError, SyntaxError) as error:
        raise UnseenError(f"module {name}, whose source cannot be read ({error})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = [ast.Pass()]
    return ast.unparse(tree).encode()
