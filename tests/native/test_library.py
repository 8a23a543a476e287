"""The declarations in ``library.py`` match ``native.h``: ctypes itself never notices a wrong type.

The compiler checks the header against the functions; this checks Python against the header.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.native import library as native

HEADER = Path(native.__file__).with_name("native.h")
NUMBERS: dict[str, type] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "kv_run": native.Common,
    "kv_turn": native.Turn,
    "kv_borrowed": native.WritePermit,
    "kv_known": native.PresenceTable,
}
ADDRESSES = (ctypes.c_void_p, ctypes.c_char_p)
CONSTANTS = {"KV_ADDRESS_BYTES": 16, "KV_DIGEST_BYTES": 32}
SIZES = {"uint8_t": 1, "kv_hash": 9 * 8, "kv_arrival": 11 * 8}
SIZES |= {name: ctypes.sizeof(number) for name, number in NUMBERS.items()}


def header() -> str:
    """The header without comments."""
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def declared() -> dict[str, tuple[str, list[str]]]:
    """Returns each function's result and argument types as C declares them, for those that Python may call."""
    code = HEADER.read_text()
    start, end = code.index("/* Functions that Python"), code.index("/* Functions that only")
    code = re.sub(r"/\*.*?\*/", "", code[start:end], flags=re.DOTALL)
    functions = re.findall(r"(\w+) (kv_\w+)\(([^)]*)\);", code)
    assert len(functions) == code.count(";")
    return {
        name: (result, [] if arguments == "void" else [kind_of(each) for each in arguments.split(",")])
        for result, name, arguments in functions
    }


def kind_of(declaration: str) -> str:
    """The type of a field or argument: ``const kv_run *run`` is ``kv_run *``."""
    found = re.fullmatch(r"\s*(?:const )?(\w+) (\**)\w+\s*", declaration)
    assert found, declaration
    return f"{found[1]} {'*' * bool(found[2])}".strip()


def fits(kind: str, given: Any) -> bool:
    """True if a ctypes type is how Python may give that type of C."""
    if not kind.endswith("*"):
        return given is NUMBERS[kind]
    structure = STRUCTURES.get(kind.removesuffix(" *"))
    return given is ctypes.POINTER(structure) if structure else given in ADDRESSES


def wrong(functions: dict[str, native.Function]) -> list[str]:
    """The functions that are declared in another way than the header has them, or in one of the two alone."""
    theirs = declared()
    found = [*(functions.keys() ^ theirs.keys())]
    for name in functions.keys() & theirs.keys():
        (result, arguments), (kind, kinds) = functions[name], theirs[name]
        is_right = result is (None if kind == "void" else NUMBERS[kind]) and len(arguments) == len(kinds)
        if not is_right or not all(map(fits, kinds, arguments)):
            found.append(name)
    return sorted(found)


def fields_of(structure: str) -> list[tuple[str, str, int]]:
    """The fields of a structure: name, type, and how many of them; 1 for no array."""
    body = next(
        body for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", header(), re.DOTALL) if name == structure
    )
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        plain, _, count = line.removesuffix("]").partition("[")
        size = CONSTANTS[count] if count in CONSTANTS else int(count or 1)
        found.append((plain.rpartition(" ")[2].lstrip("*"), kind_of(plain), size))
    return found


def test_every_function_is_declared_as_the_header_has_it() -> None:
    assert len(native.FUNCTIONS) > 30
    assert wrong(native.FUNCTIONS) == []


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_has_the_fields_of_the_header(name: str) -> None:
    fields = [(field[0], field[1]) for field in STRUCTURES[name]._fields_]
    theirs = fields_of(name)
    assert [field for field, _ in fields] == [field for field, _, _ in theirs]
    for (field, given), (_, kind, count) in zip(fields, theirs, strict=True):
        if count > 1:
            assert given is ctypes.c_ubyte * count and kind == "uint8_t", field
        elif kind.endswith("*"):
            assert ctypes.sizeof(given) == ctypes.sizeof(ctypes.c_void_p), field
        else:
            assert given is NUMBERS[kind], field


def test_a_chunk_has_the_fields_of_the_header() -> None:
    """By their offsets: C lays them out as they come, and none needs padding."""
    sizes = [count * SIZES.get(kind, 8) for _, kind, count in fields_of("kv_chunk")]
    names = [name for name, _, _ in fields_of("kv_chunk")]
    assert native.CHUNK.names == tuple(names)
    assert native.CHUNK.fields is not None
    assert [native.CHUNK.fields[name][1] for name in names] == [sum(sizes[:at]) for at in range(len(sizes))]
    assert np.dtype(native.CHUNK, align=True).itemsize == sum(sizes)


def test_the_sizes_of_what_only_c_looks_into() -> None:
    for name, expected in (
        ("kv_verified", native.VERIFIED_BYTES),
        ("kv_arrival", native.MOVED_BYTES),
        ("kv_rows_arrival", native.ROWS_BYTES),
        ("kv_departure", native.SENT_BYTES),
    ):
        used = sum(count * SIZES[kind] for _, kind, count in fields_of(name))
        assert -(-used // 8) * 8 == expected, name
