"""Seeded faults of files: truncations anywhere, and flipped bits where a bit can change what a file says."""

import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What was done to which file."""

    file: Path
    what: str


def damage(files: list[Path], *, seed: int) -> Fault:
    """Truncate one of the files or flip a bit in up to three bytes of it, as the seed says.

    Args:
        files: to choose from; bytes of a safetensors file are flipped in its header alone.
        seed: the same seed does the same to the same files.
    """
    draw = random.Random(seed)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    if not content or draw.random() < 0.4:
        length = draw.randrange(len(content)) if content else 0
        file.write_bytes(content[:length])
        return Fault(file=file, what=f"cut to {length} of {len(content)} bytes")
    end = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else len(content)
    places = draw.sample(range(end), draw.randint(1, min(3, end)))
    for place in places:
        content[place] ^= 1 << draw.randrange(7)  # text mostly stays text: the parsers get past the encoding
    file.write_bytes(content)
    return Fault(file=file, what=f"bytes {places} flipped")
