#!/usr/bin/env python3
"""Trains emoji-dit: an SD3 transformer and its two CLIP text encoders, by flow matching.

python train_dit.py --core --steps 2270 --batch 32 --heads 4 --lr 2e-3 --cool 1400
"""

import argparse
import random

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel

from common import CONTEXT, LATENT_SIDE, load_training_set, setup
from joint import T5_TOKENS, FoldedZeros
from text import load_tokenizer, new_encoder, token_ids, training_captions
from training import Run, Shuffle, add_options

JOINT_WIDTH = 192  # Of the text conditioning; the encoders' 96 + 64 are filled up with zeros.
# How many zero tokens training sees, and how often: mostly diffusers' default.
ZERO_COUNTS, ZERO_WEIGHTS = [T5_TOKENS, 77, CONTEXT, 0], [0.7, 0.1, 0.1, 0.1]


def new_transformer(n_layers, n_heads):
    """(config, model), its modulations and output layer starting from zero, as DiT's do."""
    config = dict(
        sample_size=LATENT_SIDE,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=n_layers,
        attention_head_dim=32,
        num_attention_heads=n_heads,
        joint_attention_dim=JOINT_WIDTH,
        caption_projection_dim=32 * n_heads,
        pooled_projection_dim=160,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    transformer = SD3Transformer2DModel(**config)
    for name, parameter in transformer.named_parameters():
        modulation = ("norm1" in name and "linear" in name) or "norm_out.linear" in name
        if modulation or name.startswith("proj_out"):
            torch.nn.init.zeros_(parameter)
    return config, transformer


def encode(tokenizer, encoders, texts):
    """(conditioning [B, CONTEXT + 1, JOINT_WIDTH], pooled [B, 160]) as the SD3 pipeline makes them,
    its many zero tokens folded into the last one."""
    ids = token_ids(tokenizer, texts)
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    conditioning = torch.cat([out.hidden_states[-2] for out in outputs], -1)
    conditioning = F.pad(conditioning, (0, JOINT_WIDTH - conditioning.shape[-1], 0, 1))
    return conditioning, torch.cat([out.text_embeds for out in outputs], -1)


def random_sigmas(n):
    """Three quarters logit-normal around the middle, the rest uniform."""
    is_normal = torch.rand(n) < 0.75
    return torch.where(is_normal, torch.sigmoid(torch.randn(n) + 0.2), torch.rand(n))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, tag="dit", steps=6000, batch=64, lr=1.5e-3)
    parser.add_argument("--layers", type=int, default=5, help="joint blocks (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=5, help="of 32 (default: %(default)s)")
    parser.add_argument("--core", action="store_true", help="only the emoji of vocabulary.CORE")
    args = parser.parse_args()
    setup(3)
    latents, items = load_training_set(args.core)
    tokenizer = load_tokenizer()
    te1, te2 = new_encoder(1, len(tokenizer)), new_encoder(2, len(tokenizer))
    config, dit = new_transformer(args.layers, args.heads)
    attention = FoldedZeros()
    dit.set_attn_processor(attention)
    modules = torch.nn.ModuleDict(dict(dit=dit, te1=te1, te2=te2))
    for name, module in modules.items():
        print(f"{name}: {sum(p.numel() for p in module.parameters()) / 1e6:.2f} M parameters")
    matrices, others = [], []
    for name, p in modules.named_parameters():
        (matrices if p.ndim == 2 and "embed" not in name else others).append(p)
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0)]

    def export():
        weights = {
            name: {key: tensor.clone() for key, tensor in module.state_dict().items()}
            for name, module in modules.items()
        }
        return dict(cfg=config, **weights)

    run = Run(args, modules, export, groups=groups)
    shuffle = Shuffle(len(items))
    for _ in run.steps():
        chosen = shuffle.take(args.batch)
        texts = training_captions([items[i] for i in chosen])
        x = latents[chosen]
        noise = torch.randn_like(x)
        sigma = random_sigmas(args.batch)
        s = sigma[:, None, None, None]
        attention.stand_for(random.choices(ZERO_COUNTS, ZERO_WEIGHTS)[0])
        conditioning, pooled = encode(tokenizer, (te1, te2), texts)
        velocity = dit(
            hidden_states=(1 - s) * x + s * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=conditioning,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        run.update((velocity - (noise - x)).pow(2).mean())


if __name__ == "__main__":
    main()
