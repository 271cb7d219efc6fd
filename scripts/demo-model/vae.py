#!/usr/bin/env python3
"""Trains a small AutoencoderKL (f4, 4 channels) on all glyph pictures.

    python vae.py [--steps 6000]

Most steps see random crops, the last ones whole pictures. Every save also draws $BUILD/<tag>.png:
held-out pictures beside their reconstructions.
"""

import argparse
import math
import random

import torch
from diffusers import AutoencoderKL
from PIL import Image

from common import BUILD, SIDE, grid, load_items, load_pictures, on_white, setup
from training import Run, add_options


def psnr(mean_square):
    """In decibels, of pictures in -1..1."""
    return -10 * math.log10(mean_square / 4)


def augmented(rgba, crop):
    """Floats [N, 3, H, W] in -1..1: flipped half of the time, cropped to a side of `crop` pixels
    (0: not), one in five on a random colour and not on white."""
    x = rgba.float().permute(0, 3, 1, 2) / 255
    n = x.shape[0]
    if random.random() < 0.5:
        x = x.flip(3)
    if crop:
        last = SIDE - crop
        corners = [(random.randint(0, last), random.randint(0, last)) for _ in range(n)]
        crops = zip(x, corners, strict=True)
        x = torch.stack([p[:, i : i + crop, j : j + crop] for p, (i, j) in crops])
    colour = torch.rand(n, 3, 1, 1)
    background = torch.where(torch.rand(n, 1, 1, 1) < 0.2, colour, torch.ones(n, 3, 1, 1))
    x = ((x[:, :3] + background * (1 - x[:, 3:])) * 2 - 1).clamp(-1, 1)
    return x.contiguous(memory_format=torch.channels_last)


def edge_loss(error):
    """Mean absolute difference between neighbouring pixels of the error."""
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return across + down


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, tag="vae", steps=6000, batch=16, lr=1.5e-3)
    parser.add_argument("--widths", default="16,32,64", help="channels, default: %(default)s")
    parser.add_argument("--crop", type=int, default=32, help="side of the crops in pixels")
    parser.add_argument(
        "--full",
        type=int,
        default=300,
        help="last steps, on whole pictures and half the batch (default: %(default)s)",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    setup(1)
    config = dict(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=tuple(map(int, args.widths.split(","))),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIDE,
        act_fn="silu",
        mid_block_add_attention=True,
    )
    vae = AutoencoderKL(**config).to(memory_format=torch.channels_last)
    print(f"{sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters", flush=True)
    pictures = load_pictures()
    learned = torch.tensor([item["pic"] for item in load_items()])
    generator = torch.Generator().manual_seed(2)

    def export():
        vae.eval()
        with torch.no_grad():
            x = on_white(pictures[learned[::9]]).contiguous(memory_format=torch.channels_last)
            y = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        print(f"averaged weights: psnr {psnr((y - x).pow(2).mean().item()):.2f}", flush=True)
        pairs = torch.stack([x, y], 1).flatten(0, 1).permute(0, 2, 3, 1)
        images = ((pairs + 1) * 127.5).round().byte().numpy()
        Image.fromarray(grid(list(images), 20)).save(BUILD / f"{args.tag}.png")
        vae.train()
        return dict(cfg=config, sd={k: v.clone().contiguous() for k, v in vae.state_dict().items()})

    run = Run(
        args,
        vae,
        export,
        weight_decay=1e-4,
        betas=(0.9, 0.99),
        average=0.998,
        warm=100,
        log_every=100,
        generator=generator,
    )
    for step in run.steps():
        whole = step >= args.steps - args.full
        batch = args.batch // 2 if whole else args.batch
        half = batch // 2  # From the pictures to be learned; the rest from all.
        chosen = torch.cat(
            [
                learned[torch.randint(len(learned), (half,), generator=generator)],
                torch.randint(len(pictures), (batch - half,), generator=generator),
            ]
        )
        x = augmented(pictures[chosen], 0 if whole else args.crop)
        posterior = vae.encode(x).latent_dist
        error = vae.decode(posterior.sample()).sample - x
        kl = posterior.kl().mean() / x[0].numel()
        l1, l2 = error.abs().mean(), error.pow(2).mean()
        run.update(l1 + 2 * l2 + 0.5 * edge_loss(error) + 1e-3 * kl, l1=l1, l2=l2, kl=kl)


if __name__ == "__main__":
    main()
