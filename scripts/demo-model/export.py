#!/usr/bin/env python3
"""Writes the newest checkpoint of a training run as a diffusers folder.

    python export.py dit|unet [--shift 1.0]

The folder is $OUT/emoji-dit or $OUT/emoji-unet; model card, notice and licences that are there
already stay.
"""

import argparse
import json
import shutil

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel

from common import BUILD, OUT
from text import load_tokenizer, new_encoder


def dit_pipeline(checkpoint, vae, shift):
    transformer = SD3Transformer2DModel(**checkpoint["cfg"])
    transformer.load_state_dict(checkpoint["dit"])
    tokenizer = load_tokenizer()
    te1, te2 = new_encoder(1, len(tokenizer)), new_encoder(2, len(tokenizer))
    te1.load_state_dict(checkpoint["te1"])
    te2.load_state_dict(checkpoint["te2"])
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae,
        text_encoder=te1,
        tokenizer=tokenizer,
        text_encoder_2=te2,
        tokenizer_2=load_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def unet_pipeline(checkpoint, vae):
    unet = UNet2DConditionModel(**checkpoint["cfg"])
    unet.load_state_dict(checkpoint["unet"])
    tokenizer = load_tokenizer()
    text_encoder = CLIPTextModel(new_encoder(1, len(tokenizer)).config)
    # SD1's encoder has no projection and, in this version, names without the inner module's prefix.
    weights = {
        name.removeprefix("text_model."): weight
        for name, weight in checkpoint["te"].items()
        if not name.startswith("text_projection")
    }
    text_encoder.load_state_dict(weights)
    vae.register_to_config(shift_factor=None)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(**checkpoint["sched"]),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def tidy(folder):
    """Gives the tokenizers the classic four files and drops local paths from the configs."""
    for tokenizer in folder.glob("tokenizer*"):
        shutil.rmtree(tokenizer)
        shutil.copytree(BUILD / "tokenizer", tokenizer)
    for file in folder.rglob("config.json"):
        content = json.loads(file.read_text())
        if content.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(content, indent=2) + "\n")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=["dit", "unet"])
    parser.add_argument("--shift", type=float, default=1.0, help="of dit's sampler (default: 1.0)")
    args = parser.parse_args()
    checkpoint = torch.load(BUILD / f"{args.which}.pt", weights_only=False)
    vae = AutoencoderKL.from_pretrained(BUILD / "vae")
    if args.which == "dit":
        pipe = dit_pipeline(checkpoint, vae, args.shift)
    else:
        pipe = unet_pipeline(checkpoint, vae)
    folder = OUT / f"emoji-{args.which}"
    for component in pipe.components:
        shutil.rmtree(folder / component, ignore_errors=True)
    pipe.to(dtype=torch.float16).save_pretrained(folder, safe_serialization=True)
    tidy(folder)
    n_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    losses = [round(loss, 4) for _, loss in checkpoint["hist"][-3:]]
    print(
        f"{folder}: {n_bytes / 1e6:.2f} MB of weights after {checkpoint['step']} steps of "
        f"{checkpoint['batch']}; last losses {losses}"
    )


if __name__ == "__main__":
    main()
