#!/usr/bin/env python3
"""Records a reference case, in make_reference.py's layout, from a diffusers folder that exists
already, such as the trained demo checkpoint.

    python make_demo_case.py MODEL_DIR --out CASE_DIR [--prompt TEXT] [--width W --height H] ...

CASE_DIR/model becomes a copy of MODEL_DIR (model card and notices included) or, with --link, a
relative link to it, beside CASE_DIR/reference.json and CASE_DIR/reference.safetensors. The defaults
are the call of the committed case tests/data/emoji-dit. The case's family follows from the pipeline
class; the families known here, sd and sd3, have latents of [1, C, h, w].
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import diffusers
from make_reference import record

FAMILIES = {"StableDiffusion3Pipeline": "sd3", "StableDiffusionPipeline": "sd"}


def latents_shape(model, width, height):
    """[1, C, h, w] of the model's latents for a picture of the given size in pixels."""
    vae = json.loads((model / "vae" / "config.json").read_text())
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    return [1, vae["latent_channels"], height // factor, width // factor]


def main():
    parser = argparse.ArgumentParser(
        description="Records a reference case from a diffusers folder that exists already."
    )
    parser.add_argument("model", type=Path, help="the diffusers folder")
    parser.add_argument("--out", required=True, type=Path, help="case folder to write, replaced")
    parser.add_argument("--case", help="name of the case (default: the name of the case folder)")
    parser.add_argument("--prompt", default="a red apple", help="default: %(default)s")
    parser.add_argument("--negative", default="", help="negative prompt (default: empty)")
    parser.add_argument("--width", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument("--height", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--guidance", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--link", action="store_true", help="link to the model, do not copy it")
    parser.add_argument("--no-bf16", action="store_true", help="skip the bfloat16 run")
    args = parser.parse_args()

    class_name = json.loads((args.model / "model_index.json").read_text())["_class_name"]
    if class_name not in FAMILIES:
        raise SystemExit(f"unknown pipeline class {class_name}; known: {', '.join(FAMILIES)}")
    config = dict(
        family=FAMILIES[class_name],
        latents=latents_shape(args.model, args.width, args.height),
        call=dict(
            prompt=args.prompt,
            negative_prompt=args.negative,
            height=args.height,
            width=args.width,
            num_inference_steps=args.steps,
            guidance_scale=args.guidance,
        ),
    )
    if args.model.resolve().is_relative_to(args.out.resolve()):
        raise SystemExit(f"{args.out} would be replaced, and the model lies inside it")
    shutil.rmtree(args.out, ignore_errors=True)
    if args.link:
        args.out.mkdir(parents=True)
        target = os.path.relpath(args.model.resolve(), args.out.resolve())
        (args.out / "model").symlink_to(target, target_is_directory=True)
    else:
        shutil.copytree(args.model, args.out / "model", copy_function=shutil.copyfile)
    case = args.case or args.out.resolve().name
    record(args.out, case, config, getattr(diffusers, class_name), bf16=not args.no_bf16)


if __name__ == "__main__":
    main()
