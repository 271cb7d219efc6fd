#!/usr/bin/env python3
"""Writes pictures.json: what transformers' processors of pictures, in Pillow's version, make of a few, and the sizes that Qwen2-VL's
chooses.

    pip install numpy pillow torch transformers
    python make_pictures.py
"""
import json
from pathlib import Path

import numpy
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

HERE = Path(__file__).resolve().parent
CLIP = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}, "do_center_crop": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255}
CASES = [
    ("qwen", {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 4, "merge_size": 2}, 40, 90),
    ("qwen", {"size": {"shortest_edge": 64, "longest_edge": 700}, "patch_size": 3, "temporal_patch_size": 1, "image_mean": [0.5, 0.5, 0.25], "image_std": [0.5, 0.25, 1.0]}, 50, 31),
    ("qwen", {"size": {"shortest_edge": 64, "longest_edge": 700}, "patch_size": 4, "do_normalize": False}, 24, 16),
    ("clip", CLIP, 40, 23), ("clip", CLIP, 9, 31), ("clip", CLIP, 12, 12),
    ("clip", {**CLIP, "size": {"height": 15, "width": 20}, "crop_size": {"height": 13, "width": 10}}, 33, 21), ("clip", {**CLIP, "do_center_crop": False}, 33, 21),
]


def picture(width, height):
    i = numpy.arange(width * height * 3, dtype=numpy.int64)
    data = ((i * i // 7 + 31 * i) % 256).astype(numpy.uint8)
    return Image.fromarray(data.reshape(height, width, 3), "RGB")


def pixels(kind, config, width, height):
    image = picture(width, height)
    if kind == "clip":
        values = CLIPImageProcessorPil(**config)(images=image, return_tensors="np")["pixel_values"][0]
        return values.transpose(1, 2, 0)
    processor = Qwen2VLImageProcessorPil(**config)
    out = processor(images=image, return_tensors="np")
    _, rows, columns = out["image_grid_thw"][0]
    p, m, t = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    patches = out["pixel_values"].reshape(rows // m, columns // m, m, m, 3, t, p, p)
    assert (patches[..., :1, :, :] == patches).all()
    return patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)


def main():
    cases = []
    for kind, config, width, height in CASES:
        values = pixels(kind, config, width, height)
        cases.append({"kind": kind, "config": config, "width": width, "height": height, "size": list(values.shape[:2]), "values": [float(f"{x:.9g}") for x in values.flatten().tolist()]})
    sizes_config = {"min_pixels": 3136, "max_pixels": 1003520}
    sizes = []
    for width, height in [(28, 28), (14, 14), (42, 42), (70, 98), (1024, 1024), (1, 1), (1, 200), (4000, 3000), (3000, 4000), (13, 2000), (8192, 64), (1024, 576), (392, 400), (1001, 1003), (56, 55), (200, 15)]:
        h, w = smart_resize(height, width, 28, 3136, 1003520)
        sizes.append([width, height, w, h])
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases, "sizes_config": sizes_config, "sizes": sizes}
    (HERE / "pictures.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
