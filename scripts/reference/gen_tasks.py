#!/usr/bin/env python3
"""Writes tasks.json, the table of reference cases that begin with a picture, for make_reference.py.

    python gen_tasks.py [--out tasks.json]
    python make_reference.py --configs tasks.json --out DIR

Each is a case of gen_families.py with a task: its pictures' (and mask's) height and width, and what
else it needs.
"""

import argparse
import copy
import json
from pathlib import Path

from gen_families import CASES as FAMILIES

CASES = {}


def case(base, task, images, *, mask=None, call=None, without=(), unet=None, **changes):
    """A case of gen_families.py with a task. `call` adds arguments, `without` names those that the
    task's pipeline does not take."""
    config = copy.deepcopy(FAMILIES[base])
    config.update(changes)
    config["task"] = task
    config["images"] = images
    if mask:
        config["mask"] = mask
    config["call"].update(call or {})
    for name in without:
        config["call"].pop(name, None)
    if unet:
        config["unet"].update(unet)
    return config


SIZE = ("height", "width")
NINE = dict(in_channels=9)

# diffusers' img2img pipelines of SD and SDXL take the size of the picture.
CASES["sd15-img2img"] = case(
    "sd15",
    "image-to-image",
    [[64, 64]],
    call=dict(strength=0.7, num_inference_steps=6),
    without=SIZE,
)
CASES["sd15-inpaint"] = case(
    "sd15",
    "inpaint",
    [[64, 64]],
    mask=[64, 64],
    call=dict(strength=1.0, num_inference_steps=4),
)
CASES["sd15-inpaint-part"] = case(
    "sd15",
    "inpaint",
    [[64, 64]],
    mask=[64, 64],
    call=dict(strength=0.6, num_inference_steps=6),
)
CASES["sd15-inpaint9"] = case(
    "sd15",
    "inpaint",
    [[64, 64]],
    mask=[64, 64],
    call=dict(strength=1.0, num_inference_steps=4),
    unet=NINE,
    saved_as_task=True,
    options=dict(requires_safety_checker=False),
)
CASES["sd15-inpaint9-part"] = case(
    "sd15",
    "inpaint",
    [[64, 64]],
    mask=[64, 64],
    call=dict(strength=0.75, num_inference_steps=5),
    unet=NINE,
    saved_as_task=True,
    options=dict(requires_safety_checker=False),
)
CASES["sdxl-img2img"] = case(
    "sdxl",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.6, num_inference_steps=5),
    without=SIZE,
)
CASES["sdxl-inpaint"] = case(
    "sdxl",
    "inpaint",
    [[128, 96]],
    mask=[128, 96],
    call=dict(strength=0.9999, num_inference_steps=4),
)
CASES["sdxl-inpaint9"] = case(
    "sdxl",
    "inpaint",
    [[128, 96]],
    mask=[128, 96],
    call=dict(strength=0.85, num_inference_steps=5),
    unet=NINE,
    saved_as_task=True,
)
CASES["sd3-img2img"] = case(
    "sd3",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.5, num_inference_steps=5),
)
CASES["sd3-inpaint"] = case(
    "sd3",
    "inpaint",
    [[128, 96]],
    mask=[128, 96],
    call=dict(strength=0.8, num_inference_steps=5),
)
# The picture and the mask have other sizes than what is made.
CASES["sd15-img2img-resized"] = case(
    "sd15",
    "image-to-image",
    [[77, 61]],
    call=dict(strength=0.7, num_inference_steps=4),
    without=SIZE,
    latents=[1, 4, 38, 30],
)
CASES["sd15-inpaint-resized"] = case(
    "sd15",
    "inpaint",
    [[90, 70]],
    mask=[90, 70],
    call=dict(strength=0.8, num_inference_steps=4),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().with_name("tasks.json"),
        help="file to write (default: tasks.json beside this script)",
    )
    args = parser.parse_args()
    args.out.write_text(json.dumps(CASES, indent=1) + "\n")


if __name__ == "__main__":
    main()
