"""Writes resized.json: pictures at other sizes, as Pillow makes them. Needs Pillow."""

import json
from pathlib import Path

from PIL import Image

CASES = [
    # width, height, to_width, to_height
    (16, 12, 8, 8),
    (7, 5, 16, 24),
    (33, 21, 16, 16),
    (64, 48, 13, 11),
    (10, 10, 10, 7),
    (5, 9, 12, 9),
    (10, 24, 9, 10),
    (6, 20, 8, 10),
    (12, 20, 8, 12),
]


def source(n: int) -> bytes:
    return bytes((i * i // 7 + 31 * i) % 256 for i in range(n))


def main() -> None:
    table = []
    for width, height, to_width, to_height in CASES:
        for n_channels, mode in [(1, "L"), (3, "RGB")]:
            for name, resample in [("lanczos", Image.LANCZOS), ("bicubic", Image.BICUBIC)]:
                picture = Image.frombytes(mode, (width, height), source(width * height * n_channels))
                resized = picture.resize((to_width, to_height), resample)
                table.append({
                    "width": width,
                    "height": height,
                    "to_width": to_width,
                    "to_height": to_height,
                    "n_channels": n_channels,
                    "filter": name,
                    "bytes": list(resized.tobytes()),
                })
    Path(__file__).with_name("resized.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


main()
