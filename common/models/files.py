"""Which safetensors files make up a checkpoint, and a digest of what they hold. Torch-free.

A safetensors file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the data.
"""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from common.config import JsonObject
from common.errors import StartupError

SAMPLE_NBYTES = 2048  # read at the head, middle and end of each tensor: about 2 MB of a 300-tensor checkpoint, under 0.1 s
MAX_HEADER_NBYTES = 100 << 20  # the format's own limit


def weight_files(model_dir: Path) -> list[Path]:
    """The checkpoint's files, as transformers chooses them: one file, else what the index names, else all there are."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StartupError(f"{index} cannot be read: {error!r}") from None
        files = [model_dir / name for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise StartupError(f"{model_dir} is incomplete: {index.name} names {', '.join(missing)}, not there; download it again")
        return files
    if files := sorted(model_dir.glob("*.safetensors")):
        return files
    raise StartupError(f"{model_dir} holds no *.safetensors; other weight formats must be converted with transformers' save_pretrained first")


def weight_digest(model_dir: Path) -> bytes:
    """SHA-256 over name, dtype, shape and sampled bytes of every tensor, in the order of names."""
    digests: dict[str, bytes] = {}
    for path in weight_files(model_dir):
        try:
            with path.open("rb") as file:
                data_start, header = _read_header(file)
                for name, entry in header.items():
                    digests[name] = _sampled(file, data_start, name, entry)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StartupError(f"{path} is not a readable safetensors file: {error!r}") from None
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).digest()


def _read_header(file: BinaryIO) -> tuple[int, JsonObject]:
    nbytes = int.from_bytes(file.read(8), "little")
    if not 2 <= nbytes <= MAX_HEADER_NBYTES:
        raise ValueError(f"header of {nbytes} bytes")
    header: JsonObject = json.loads(file.read(nbytes))
    header.pop("__metadata__", None)
    return 8 + nbytes, header


def _sampled(file: BinaryIO, data_start: int, name: str, entry: JsonObject) -> bytes:
    begin, end = entry["data_offsets"]
    digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
    last = max(begin, end - SAMPLE_NBYTES)
    for offset in sorted({begin, (begin + last) // 2, last}):
        file.seek(data_start + offset)
        digest.update(file.read(min(SAMPLE_NBYTES, end - offset)))
    return digest.digest()
