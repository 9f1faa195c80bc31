"""Ways in which a file may be damaged."""

from __future__ import annotations

import random
from pathlib import Path

DAMAGES = ("bit", "bytes", "truncate", "zero block", "swap blocks", "append", "remove", "double block")
_BLOCK_BYTES = 4096


def damage(directory: Path, kind: str, rng: random.Random) -> str:
    """Damage one file of a directory, and return what was done."""
    path = rng.choice(sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    block, other = (_BLOCK_BYTES * rng.randrange(max(1, len(data) // _BLOCK_BYTES)) for _ in range(2))
    match kind:
        case "bit":
            data[place] ^= 1 << rng.randrange(8)
        case "bytes":
            data[place : place + 16] = rng.randbytes(len(data[place : place + 16]))
        case "truncate":
            del data[place:]
        case "zero block":
            data[block : block + _BLOCK_BYTES] = bytes(len(data[block : block + _BLOCK_BYTES]))
        case "swap blocks":
            here, there = slice(block, block + _BLOCK_BYTES), slice(other, other + _BLOCK_BYTES)
            data[here], data[there] = data[there], data[here]
        case "double block":
            data[block:block] = data[block : block + _BLOCK_BYTES]
        case "append":
            data += rng.randbytes(rng.choice([1, 24, 5000]))
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{kind} of {path.name} ({len(data)} bytes) at {place}, blocks at {block} and {other}"
