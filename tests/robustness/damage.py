"""Ways to damage a file, each a function of its bytes and a seeded generator.

Three groups differ in what a loader can notice:

- `raw` damage changes any bytes. Inside the numbers of a tensor, or a digit of JSON, no loader can notice it.
- `json` damage replaces, removes or adds a value of a JSON document, which stays well-formed.
- `header` damage changes the description of tensors in a safetensors file. A loader must refuse it, because the changed
  header describes no other model correctly.
"""

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    10**7,
    2**31,
    2**53 + 1,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "\x1b[31m\r\n",
    "../../etc/passwd",
    "(a+)+$",
    "cuda:99",
    "9" * 5000,
    [],
    {},
    [[]],
    [None],
    [1, 2, 3],
    {"x": 1},
    {"__class__": "os.system"},
    ["a"] * 1000,
]
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "C64", "X"]


def truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def empty(data: bytes, random: Random) -> bytes:
    return b""


def append(data: bytes, random: Random) -> bytes:
    return data + random.choice([b"\0", b"\n", b"}", data, random.randbytes(64)])


def flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 8, 64])):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _range(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice([1, 2, 8, 64, 1024]))


def zero(data: bytes, random: Random) -> bytes:
    a, b = _range(data, random)
    return data[:a] + bytes(b - a) + data[b:]


def fill(data: bytes, random: Random) -> bytes:
    a, b = _range(data, random)
    return data[:a] + random.randbytes(b - a) + data[b:]


def duplicate(data: bytes, random: Random) -> bytes:
    a, b = _range(data, random)
    return data[:b] + data[a:]


def remove(data: bytes, random: Random) -> bytes:
    a, b = _range(data, random)
    return data[:a] + data[b:]


def swap(data: bytes, random: Random) -> bytes:
    (a, b), (c, d) = sorted([_range(data, random), _range(data, random)])
    return data if b > c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


RAW = [truncate, truncate, empty, append, flip, flip, flip, zero, fill, duplicate, remove, swap]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def change_json(value: Any, random: Random) -> Any:
    """Replace one value of the document by a hostile one, remove or repeat it, or add a key."""
    path = random.choice(places(value))
    if not path:
        return random.choice(HOSTILE)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, how = path[-1], random.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[random.choice(["extra", "", "__init__", key + "x"])] = random.choice(HOSTILE)
    elif how == 1:
        holder.append(holder[key])
    elif how == 2 and isinstance(holder[key], int | float):
        holder[key] = random.choice([holder[key] + 1, -holder[key], holder[key] * 2, holder[key] * 10**6])
    elif how == 3 and isinstance(holder[key], str) and _is_json(holder[key]):  # JSON inside the header of safetensors
        holder[key] = dump(change_json(json.loads(holder[key]), random))
    else:
        holder[key] = random.choice(HOSTILE)
    return value


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def dump(value: Any) -> str:
    return json.dumps(value)  # NaN and Infinity too, which Python reads


def damage_json(data: bytes, random: Random) -> bytes:
    if random.randrange(20) == 0:
        depth = random.choice([500, 100_000])
        return random.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    return dump(change_json(json.loads(data), random)).encode()


def damage_lines(data: bytes, random: Random) -> bytes:
    """Damage one line of JSONL."""
    lines = data.splitlines()
    i = random.randrange(len(lines))
    lines[i] = damage_json(lines[i], random)
    return b"\n".join(lines) + b"\n"


def split_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_header(header: dict[str, Any], body: bytes) -> bytes:
    text = dump(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns
    return struct.pack("<Q", len(text)) + text + body


def damage_metadata(data: bytes, random: Random) -> bytes:
    """Change one value of the metadata, or of the JSON inside it; values stay strings."""
    header, body = split_header(data)
    metadata = header.get("__metadata__")
    if not metadata:
        return flip(data, random)
    key = random.choice(sorted(metadata))
    how = random.randrange(6)
    if how == 0:
        del metadata[key]
    elif _is_json(metadata[key]) and how > 1:
        metadata[key] = dump(change_json(json.loads(metadata[key]), random))
    else:
        metadata[key] = random.choice([value for value in HOSTILE if isinstance(value, str)] + ["[" * 100_000, "{}"])
    return join_header(header, body)


def damage_header(data: bytes, random: Random) -> bytes:
    """Give one tensor another name, shape, dtype or place, remove it, or add a tensor."""
    header, body = split_header(data)
    names = sorted(name for name in header if name != "__metadata__")
    name = random.choice(names)
    entry, how = header[name], random.randrange(9)
    if how == 0:
        del header[name]
    elif how == 1:
        header[random.choice(["x", name + "x", name[1:], name.upper(), "../" + name, ""])] = header.pop(name)
    elif how == 2:
        entry["dtype"] = random.choice([kind for kind in DTYPES if kind != entry["dtype"]])
    elif how == 3:
        shapes = [[*entry["shape"], 2], [], [-1], [2**40, 2**40], [0], [*map(str, entry["shape"]), "x"]]
        entry["shape"] = random.choice(shapes)
    elif how == 4:
        entry["data_offsets"] = random.choice([[0, 0], [0, 2**62], [8, 4], [-8, 8], [1.5, 2], None])
    elif how == 5:
        header["one.too.many"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(body), len(body) + 4]}
        body += bytes(4)
    elif how == 6:
        return struct.pack("<Q", random.choice([0, 1, 2**20, 2**40, 2**63, 2**64 - 1])) + data[8:]
    elif how == 7:  # a shape that has as many numbers
        shape = entry["shape"]
        entry["shape"] = [1, *shape] if len(set(shape)) < 2 else [shape[1], shape[0], *shape[2:]]
    else:
        header[name] = change_json(entry, random)
    return join_header(header, body)


def damage(name: str, data: bytes, random: Random) -> tuple[str, bytes]:
    """Damage a file in a way that suits its name; returns the group and name of the damage, and the changed bytes."""
    own: list[tuple[str, Callable[[bytes, Random], bytes]]] = []
    if name.endswith(".json"):
        own = [("json", damage_json)] * 3
    elif name.endswith(".jsonl"):
        own = [("json", damage_lines)]
    elif name.endswith((".safetensors", ".checkpoint")):
        own = [("header", damage_header), ("json", damage_metadata)]
    group, function = random.choice([*own, ("raw", random.choice(RAW))])
    return f"{group}: {function.__name__}", function(data, random)
