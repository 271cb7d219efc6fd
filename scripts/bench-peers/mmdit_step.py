#!/usr/bin/env python3
"""Times one forward step of SD3-medium's transformer in diffusers, on the CPU in float32.

    python mmdit_step.py [--layers 24] [--latent 128] [--batch 1,2] [--threads 2]
    python mmdit_step.py --layers 4 --save DIR --dtype fp16     # ... and keep weights and output
    python mmdit_step.py --model DIR                            # time weights that exist already

The weights are random, from a seed, unless --model names a diffusers folder. 128 latents per side
are a picture of 1024 x 1024, 64 one of 512 x 512. Prints one JSON object with the seconds of every
repetition for every batch size.

--save DIR writes what another implementation needs to time the same step on the same weights and
to compare its result:

DIR/transformer/        config.json and safetensors, a diffusers folder's component
DIR/step.safetensors    float32: hidden_states [B, 16, h, w], encoder_hidden_states [B, 333, 4096],
                        pooled_projections [B, 2048], timestep [B] and output [B, 16, h, w], B the
                        largest batch size; a smaller batch is the first rows
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from wide_sd3 import DTYPES, N_LAYERS, random_inputs, random_transformer


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layers", type=int, default=N_LAYERS, help="joint blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--latent", type=int, default=128, help="latents per side (default: %(default)s)"
    )
    parser.add_argument("--batch", default="1", help="comma-separated sizes (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="runs before (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="what weights are rounded to and saved as; computing is in fp32 (default: fp32)",
    )
    parser.add_argument(
        "--model", type=Path, help="folder with transformer/ to time instead of random weights"
    )
    parser.add_argument("--save", type=Path, help="folder for weights, inputs and output")
    return parser.parse_args()


def load_transformer(folder):
    model = diffusers.SD3Transformer2DModel.from_pretrained(
        folder, subfolder="transformer", dtype=torch.float32
    )
    return model.requires_grad_(False).eval()


def cpu_name():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def time_step(model, inputs, n_warmup, n_repeats):
    """(seconds of each timed run, output of the last)."""
    seconds = []
    for _ in range(n_warmup + n_repeats):
        start = time.perf_counter()
        output = model(**inputs, return_dict=False)[0]
        seconds.append(time.perf_counter() - start)
    return seconds[n_warmup:], output


@torch.inference_mode()
def main():
    args = parse_args()
    diffusers.utils.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.model:
        model = load_transformer(args.model)
    else:
        model = random_transformer(args.layers, args.seed, DTYPES[args.dtype])
    batches = sorted(int(size) for size in args.batch.split(","))
    inputs = random_inputs(batches[-1], args.latent, args.seed + 1)
    runs = []
    for batch in batches:
        rows = {name: tensor[:batch] for name, tensor in inputs.items()}
        seconds, output = time_step(model, rows, args.warmup, args.repeat)
        runs.append(
            dict(
                batch=batch,
                seconds_median=statistics.median(seconds),
                seconds_min=min(seconds),
                seconds=seconds,
            )
        )
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        save_file(dict(inputs, output=output.contiguous()), args.save / "step.safetensors")
        model.to(DTYPES[args.dtype]).save_pretrained(args.save / "transformer")
    report = dict(
        peer=f"diffusers {diffusers.__version__}, torch {torch.__version__}",
        cpu=cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        layers=model.config.num_layers,
        latent=args.latent,
        text_tokens=inputs["encoder_hidden_states"].shape[1],
        runs=runs,
    )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
