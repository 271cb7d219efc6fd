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
CASES["sdxl-refiner"] = case(
    "sdxl",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.3, num_inference_steps=10),
    without=SIZE,
    text_encoder=None,
    unet=dict(cross_attention_dim=48, projection_class_embeddings_input_dim=48 + 5 * 8),
    saved_as_task=True,
    options=dict(requires_aesthetics_score=True),
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
CASES["sdxl-img2img-resized"] = case(
    "sdxl",
    "image-to-image",
    [[135, 101]],
    call=dict(strength=0.7, num_inference_steps=4),
    without=SIZE,
)
CASES["sd15-inpaint-resized"] = case(
    "sd15",
    "inpaint",
    [[90, 70]],
    mask=[90, 70],
    call=dict(strength=0.8, num_inference_steps=4),
)
# FLUX.1: from a picture, and Kontext, which makes about a megapixel of the given picture.
CASES["flux-img2img"] = case(
    "flux-dev",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.6, num_inference_steps=5),
)
CASES["flux-inpaint"] = case(
    "flux-dev",
    "inpaint",
    [[128, 96]],
    mask=[128, 96],
    call=dict(strength=0.7, num_inference_steps=5),
)
CASES["flux-kontext"] = case(
    "flux-dev",
    "edit",
    [[70, 100]],
    call=dict(max_area=128 * 96, num_inference_steps=2),
    saved_as_task=True,
)
CASES["flux-kontext-resized"] = case(
    "flux-dev",
    "edit",
    [[300, 60]],
    call=dict(
        height=64,
        width=64,
        max_area=64 * 64,
        num_inference_steps=1,
        negative_prompt="blurry",
        true_cfg_scale=2.0,
    ),
    latents=[1, 16, 64],
    saved_as_task=True,
)
CASES["flux2-edit"] = case("flux2-klein", "edit", [[70, 100]], saved_as_task=True)
CASES["flux2-edit-two"] = case(
    "flux2-klein",
    "edit",
    [[64, 64], [95, 129]],
    call=dict(guidance_scale=1.0),
    saved_as_task=True,
)
CASES["zimage-img2img"] = case(
    "zimage",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.6),
)
CASES["qwen-img2img"] = case(
    "qwen-image",
    "image-to-image",
    [[128, 96]],
    call=dict(strength=0.6, num_inference_steps=5),
)
CASES["qwen-inpaint"] = case(
    "qwen-image",
    "inpaint",
    [[128, 96]],
    mask=[128, 96],
    call=dict(strength=0.7, num_inference_steps=5),
)
# Pictures to edit are brought to a million pixels, so the autoencoder is narrow.
QWEN_EDIT = dict(
    processor=dict(min_pixels=3136, max_pixels=28 * 28 * 30),
    vae=dict(FAMILIES["qwen-image"]["vae"], base_dim=4),
    saved_as_task=True,
)
CASES["qwen-edit"] = case(
    "qwen-image",
    "edit",
    [[120, 90]],
    call=dict(num_inference_steps=2),
    **QWEN_EDIT,
)
CASES["qwen-edit-plus"] = case(
    "qwen-image",
    "edit",
    [[90, 70], [40, 80]],
    call=dict(num_inference_steps=2),
    pipeline="QwenImageEditPlusPipeline",
    transformer=dict(FAMILIES["qwen-image"]["transformer"], zero_cond_t=True),
    **QWEN_EDIT,
)

WAN_36 = dict(FAMILIES["wan21-t2v"]["transformer"], in_channels=36)
WAN_48 = dict(FAMILIES["wan21-t2v"]["transformer"], in_channels=48, out_channels=48)
# The autoencoder of Wan 2.2 TI2V-5B; its statistics are made up.
VAE_TI2V = dict(
    base_dim=8,
    decoder_base_dim=12,
    z_dim=48,
    dim_mult=[1, 2, 2, 2],
    num_res_blocks=1,
    temperal_downsample=[False, True, True],
    in_channels=12,
    out_channels=12,
    patch_size=2,
    is_residual=True,
    scale_factor_spatial=16,
    scale_factor_temporal=4,
    latents_mean=[round(0.3 * (k % 7 - 3) / 3, 4) for k in range(48)],
    latents_std=[round(0.4 + (k % 11) / 11, 4) for k in range(48)],
)

CASES["wan21-i2v"] = case(
    "wan21-t2v",
    "image-to-video",
    [[64, 48]],
    # The text must fill all places that the pipeline cuts the sequence at.
    without=("max_sequence_length",),
    transformer=dict(WAN_36, image_dim=20, added_kv_proj_dim=24),
    image_encoder=dict(
        hidden_size=20,
        intermediate_size=40,
        projection_dim=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
        hidden_act="gelu",
    ),
)
CASES["wan22-i2v"] = case(
    "wan22-t2v",
    "image-to-video",
    [[48, 64]],
    transformer=WAN_36,
    transformer_2=WAN_36,
    boundary_ratio=0.9,
)
CASES["wan22-ti2v-i2v"] = case(
    "wan21-t2v",
    "image-to-video",
    [[96, 64]],
    call=dict(height=96, width=64),
    transformer=WAN_48,
    vae=VAE_TI2V,
    expand_timesteps=True,
    latents=[1, 48, 3, 6, 4],
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
