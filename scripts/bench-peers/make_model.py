#!/usr/bin/env python3
"""Makes a large random sd3 checkpoint: complete, but it draws noise.

    python make_model.py DIR [--bytes 1e9] [--layers 4] [--dtype fp32]

The transformer has SD3-medium's width and as many layers as --bytes asks for, at least --layers.
The text encoders have the widths of CLIP-L and CLIP-G with two layers and the reference cases'
small vocabulary; the autoencoder is the reference cases' (f8, 16 channels). It serves to measure
memory and speed where nothing may be downloaded: whether several workers hold one copy of the
weights, how long loading takes.
"""

import argparse
import sys
from pathlib import Path

import diffusers

from wide_sd3 import DTYPES, count_bytes, random_transformer

sys.path.append(str(Path(__file__).resolve().parents[1] / "reference"))
from gen_families import VAE_SD3  # noqa: E402
from make_reference import clip_text, clip_tokenizer, randomise  # noqa: E402

CLIP_L = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=2,
    num_attention_heads=12,
    hidden_act="quick_gelu",
    projection_dim=768,
)
CLIP_G = dict(
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=2,
    num_attention_heads=20,
    hidden_act="gelu",
    projection_dim=1280,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="diffusers folder to write")
    parser.add_argument(
        "--bytes", type=float, default=1e9, help="least size of the weights (default: 1e9)"
    )
    parser.add_argument("--layers", type=int, default=4, help="at least (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of the files (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    tokenizer, vocab_size = clip_tokenizer(args.folder / "tokenizer", "<|endoftext|>")
    tokenizer_2, vocab_size_2 = clip_tokenizer(args.folder / "tokenizer_2", "!")
    small = dict(
        vae=randomise(diffusers.AutoencoderKL(**VAE_SD3), args.seed + 1),
        text_encoder=randomise(clip_text(CLIP_L, vocab_size, tokenizer, True), args.seed + 2),
        text_encoder_2=randomise(clip_text(CLIP_G, vocab_size_2, tokenizer_2, True), args.seed + 3),
    )
    n_bytes = sum(p.numel() for module in small.values() for p in module.parameters())
    n_bytes *= dtype.itemsize
    n_layers = args.layers
    while n_bytes + count_bytes(n_layers, dtype) < args.bytes:
        n_layers += 1
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=random_transformer(n_layers, args.seed, dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        text_encoder_3=None,
        tokenizer_3=None,
        **small,
    )
    pipe.to(dtype=dtype).save_pretrained(args.folder, safe_serialization=True)
    n_bytes = sum(file.stat().st_size for file in args.folder.rglob("*.safetensors"))
    print(f"{args.folder}: {n_layers} layers, {n_bytes / 1e9:.2f} GB of weights in {args.dtype}")


if __name__ == "__main__":
    main()
