#!/usr/bin/env python3
"""Times one denoise step of an sd3 checkpoint in denoised and in diffusers, in turns, in one run.

    python compare_step.py PROGRAM MODEL [--size 512x512] [--guidance 7] [--threads 2] [--rounds 3]

PROGRAM is a release build of denoised; MODEL a diffusers folder of class StableDiffusion3Pipeline
without T5 (make_model.py makes one of SD3-medium's width). Both compute in float32 on the CPU with
the same number of threads on the same weights. A step of denoised is everything between two
latents: the denoiser for both prompts where guidance is above 1, guidance, the sampler's update
and the check for NaN; of diffusers it is the transformer's forward alone. diffusers writes the
absent T5's 256 zero tokens out, denoised weighs one for all of them, which is the same sum: part
of the ratio is that. Prints one JSON object; ratio is diffusers' time through denoised's.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import diffusers
import torch

from mmdit_step import cpu_name, load_transformer, time_step

T5_TOKENS = 256


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", default="512x512", help="of the picture (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=7.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="turns (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    return parser.parse_args()


def inputs_of(folder, transformer, size, guidance):
    """The arguments of one step, shaped as the pipeline would."""
    width, height = (int(side) for side in size.split("x"))
    vae = json.loads((folder / "vae" / "config.json").read_text())
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    tokenizer = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    n_tokens = int(tokenizer["model_max_length"]) + T5_TOKENS
    batch = 2 if guidance > 1 else 1
    config = transformer.config
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    texts = normal(batch, n_tokens, config.joint_attention_dim)
    texts[:, -T5_TOKENS:] = 0
    return dict(
        hidden_states=normal(batch, config.in_channels, height // factor, width // factor),
        encoder_hidden_states=texts,
        pooled_projections=normal(batch, config.pooled_projection_dim),
        timestep=torch.full((batch,), 500.0),
    )


def time_ours(args):
    command = [str(args.program), "bench", "step", "--json", "--model", str(args.model)]
    command += ["--size", args.size, "--guidance", str(args.guidance)]
    command += ["--threads", str(args.threads), "--steps", str(args.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [ms / 1e3 for ms in json.loads(done.stdout)["step_ms"]["all"]]


@torch.inference_mode()
def main():
    args = parse_args()
    diffusers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    transformer = load_transformer(args.model)
    inputs = inputs_of(args.model, transformer, args.size, args.guidance)
    ours, theirs, ratios = [], [], []
    for _ in range(args.rounds):
        mine = time_ours(args)
        peer, _ = time_step(transformer, inputs, 1, args.steps)
        ours += mine
        theirs += peer
        ratios.append(statistics.median(peer) / statistics.median(mine))
    report = dict(
        cpu=cpu_name(),
        peer=f"diffusers {diffusers.__version__}, torch {torch.__version__}",
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=args.threads,
        size=args.size,
        layers=transformer.config.num_layers,
        batch=inputs["timestep"].shape[0],
        denoised_s=dict(median=statistics.median(ours), min=min(ours)),
        diffusers_s=dict(median=statistics.median(theirs), min=min(theirs)),
        ratio_of_each_round=[round(ratio, 3) for ratio in ratios],
        ratio=round(statistics.median(ratios), 3),
    )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
