"""Safetensors files and JSON files, with torch and the standard library only.

Knows nothing of models. Tensors are read as views of a mapped file; random ones are written in
chunks by several threads, so that memory stays at a few chunks whatever the size of the file.
"""

import ctypes
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import torch

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
CHUNK = 1 << 22  # Elements: 16 MiB of float32 for each thread.


def write_json(path, document):
    """A reader sees the whole document or none."""
    part = f"{path}.{os.getpid()}.part"
    with open(part, "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(part, path)


def read_tensors(path):
    """{name: tensor} on the CPU, of a file with the dtypes above."""
    with open(path, "rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_size))
    data = torch.from_file(str(path), size=os.path.getsize(path), dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
            tensors[name] = data[begin:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def write_tensors(path, tensors, dtype="BF16", seed=0):
    """`tensors` is {name: (shape, values)}; the values are a tensor or the standard deviation and the
    mean of normal ones. The same seed gives the same file with any number of threads."""
    header, jobs, end = {"__metadata__": {"format": "pt"}}, [], 0
    size = DTYPES[dtype].itemsize
    for name, (shape, values) in tensors.items():
        n = torch.Size(shape).numel()
        header[name] = dict(dtype=dtype, shape=list(shape), data_offsets=[end, end + n * size])
        jobs += [(end, begin, min(CHUNK, n - begin), values) for begin in range(0, n, CHUNK)]
        end += n * size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(job_idx):
        offset, begin, n, values = jobs[job_idx]
        if isinstance(values, torch.Tensor):
            chunk = values.flatten()[begin : begin + n]
        else:
            generator = torch.Generator().manual_seed((seed << 32) + job_idx)
            chunk = torch.empty(n).normal_(values[1], values[0], generator=generator)
        chunk = chunk.to(DTYPES[dtype]).contiguous()
        raw = (ctypes.c_char * (n * size)).from_address(chunk.data_ptr())
        if os.pwrite(file.fileno(), raw, 8 + len(text) + offset + begin * size) != n * size:
            raise OSError(f"{path}: a write was cut short")

    with open(path, "wb") as file, ThreadPoolExecutor(os.cpu_count()) as threads:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        list(threads.map(write, range(len(jobs))))
