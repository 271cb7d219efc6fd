#!/usr/bin/env python3
"""Writes $BUILD/vae (a diffusers folder) and $BUILD/latents.pt, the latents to learn.

    python latents.py [--vae FOLDER]

Folds the statistics of the latents into the 1x1 quant convolutions of $BUILD/vae.pt: afterwards
each channel has mean SHIFT and standard deviation 1/SCALE, so that the SD3 rule (z - shift) * scale
whitens them exactly and the SD1 rule z * scale does up to a tiny offset. With --vae an exported
VAE, already folded, is taken as it is.
"""

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from common import BUILD, SCALE, SHIFT, load_items, load_pictures, on_white, setup
from vae import psnr


def encode(vae, x):
    return torch.cat([vae.encode(part).latent_dist.mode() for part in x.split(32)])


def fold(vae, z):
    """Changes the quant convolutions so that latents that were `z` have the statistics wanted.
    Returns the VAE rounded to float16: training uses exactly what ships."""
    mean, deviation = z.mean((0, 2, 3)), z.std((0, 2, 3))
    k = 1 / (SCALE * deviation)
    n = len(k)
    quant, post_quant = vae.quant_conv, vae.post_quant_conv
    quant.weight[:n] *= k[:, None, None, None]
    quant.bias[:n] = (quant.bias[:n] - mean) * k + SHIFT
    quant.bias[n:] += 2 * k.log()  # The second half is the log variance.
    post_quant.bias += post_quant.weight[:, :, 0, 0] @ (mean - SHIFT / k)
    post_quant.weight /= k[None, :, None, None]
    vae.register_to_config(scaling_factor=SCALE, shift_factor=SHIFT)
    return vae.half().float()


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, help="an exported VAE folder to use as it is")
    args = parser.parse_args()
    setup(0)
    x = on_white(load_pictures()[[item["pic"] for item in load_items()]])
    if args.vae:
        vae = AutoencoderKL.from_pretrained(args.vae, dtype=torch.float32)
        vae.register_to_config(scaling_factor=SCALE, shift_factor=SHIFT)
    else:
        checkpoint = torch.load(BUILD / "vae.pt", weights_only=False)
        vae = AutoencoderKL(**checkpoint["cfg"])
        vae.load_state_dict(checkpoint["sd"])
        vae.eval()
        vae = fold(vae, encode(vae, x))
    z = encode(vae, x)
    y = torch.cat([vae.decode(part).sample for part in z.split(32)]).clamp(-1, 1)
    print("channel means", z.mean((0, 2, 3)).tolist(), "wanted", SHIFT)
    print("channel deviations", z.std((0, 2, 3)).tolist(), "wanted", 1 / SCALE)
    print(f"psnr on these pictures {psnr((y - x).pow(2).mean().item()):.2f}")
    vae.save_pretrained(BUILD / "vae")
    torch.save(dict(z=(z - SHIFT) * SCALE), BUILD / "latents.pt")


if __name__ == "__main__":
    main()
