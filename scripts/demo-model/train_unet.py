#!/usr/bin/env python3
"""Trains emoji-unet: a tiny Stable Diffusion U-Net with a fine-tuned text encoder, v-prediction.

    python train_unet.py --core --steps 527 --batch 32 --cool 380 [--start FOLDER]

The text encoder starts as the first one of emoji-dit, from $BUILD/dit.pt. With --start both the
U-Net and the text encoder go on from an exported emoji-unet folder.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file

from common import BUILD, LATENT_SIDE, SCALE, SHIFT, load_training_set, setup
from text import load_tokenizer, new_encoder, token_ids, training_captions
from training import Run, Shuffle, add_options

CONFIG = dict(
    sample_size=LATENT_SIDE,
    in_channels=4,
    out_channels=4,
    block_out_channels=(64, 96, 128),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=96,
    attention_head_dim=4,
    norm_num_groups=16,
)
SCHEDULER = dict(
    num_train_timesteps=1000,
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    clip_sample=False,
    set_alpha_to_one=False,
    steps_offset=1,
    prediction_type="v_prediction",
    timestep_spacing="trailing",
)


def load_encoder(encoder, weights):
    """Loads an exported text encoder into one with a projection, which SD1 does not use.
    Whether names have the prefix of the inner module depends on the version that wrote them."""
    weights = {name.removeprefix("text_model."): weight for name, weight in weights.items()}
    full = encoder.state_dict()
    names = {name.removeprefix("text_model."): name for name in full}
    wrong = set(weights) ^ (set(names) - {"text_projection.weight"})
    if wrong:
        raise SystemExit(f"text encoder: missing or unexpected {', '.join(sorted(wrong))}")
    full.update({names[name]: weight for name, weight in weights.items()})
    encoder.load_state_dict(full)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, tag="unet", steps=4000, batch=64, lr=1.2e-3)
    parser.add_argument("--core", action="store_true", help="only the emoji of vocabulary.CORE")
    parser.add_argument("--start", type=Path, help="an exported emoji-unet folder to go on from")
    args = parser.parse_args()
    setup(4)
    latents, items = load_training_set(args.core)
    latents = latents + SHIFT * SCALE  # SD1's rule is z * scale, without a shift.
    tokenizer = load_tokenizer()
    te = new_encoder(1, len(tokenizer))
    te.text_projection.requires_grad_(False)
    unet = UNet2DConditionModel(**CONFIG)
    if args.start:
        load_encoder(te, load_file(args.start / "text_encoder/model.safetensors"))
        weights = load_file(args.start / "unet/diffusion_pytorch_model.safetensors")
        unet.load_state_dict(weights)
    else:
        te.load_state_dict(torch.load(BUILD / "dit.pt", weights_only=False)["te1"])
    modules = torch.nn.ModuleDict(dict(unet=unet, te=te))
    for name, module in modules.items():
        print(f"{name}: {sum(p.numel() for p in module.parameters()) / 1e6:.2f} M parameters")
    alphas = DDIMScheduler(**SCHEDULER).alphas_cumprod

    def export():
        weights = {
            name: {key: tensor.clone() for key, tensor in module.state_dict().items()}
            for name, module in modules.items()
        }
        return dict(cfg=CONFIG, sched=SCHEDULER, **weights)

    run = Run(args, modules, export)
    shuffle = Shuffle(len(items))
    for _ in run.steps():
        chosen = shuffle.take(args.batch)
        texts = training_captions([items[i] for i in chosen])
        x = latents[chosen]
        noise = torch.randn_like(x)
        t = torch.randint(0, 1000, (args.batch,))
        signal = alphas[t].sqrt()[:, None, None, None]
        amount = (1 - alphas[t]).sqrt()[:, None, None, None]
        conditioning = te(token_ids(tokenizer, texts)).last_hidden_state
        velocity = unet(
            signal * x + amount * noise,
            t,
            encoder_hidden_states=conditioning,
            return_dict=False,
        )[0]
        run.update((velocity - (signal * noise - amount * x)).pow(2).mean())


if __name__ == "__main__":
    main()
