#!/usr/bin/env python3
"""Writes tests/data/sd15/samplers.safetensors: what diffusers' schedulers make of that case's model.

    pip install -r requirements.txt scipy
    python scripts/reference/make_samplers.py

Each tensor has the name of a sampler and holds the latents `[1, 4, 12, 16]` before decoding: the prompt "a cat", an empty
negative prompt, guidance 7.5, 32 x 24 pixels, 6 steps, seed 7. The pipeline draws all noise itself, that of the schedulers
with fresh noise in every step from the same generator as the noise that it begins with.
"""
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

CASE = Path(__file__).resolve().parents[2] / "tests" / "data" / "sd15"
KARRAS = {"use_karras_sigmas": True}
SDE = {"algorithm_type": "sde-dpmsolver++"}
SAMPLERS = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-karras": ("EulerDiscreteScheduler", KARRAS),
    "euler-trailing": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm++-2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++-2m-sde-karras": ("DPMSolverMultistepScheduler", SDE | KARRAS),
    "dpm++-3m-sde": ("DPMSolverMultistepScheduler", SDE | {"solver_order": 3}),
    "dpm++-2s": ("DPMSolverSinglestepScheduler", {}),
    "dpm++-sde": ("DPMSolverSinglestepScheduler", SDE),
    "unipc": ("UniPCMultistepScheduler", {}),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2-a": ("KDPM2AncestralDiscreteScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
}


def main():
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(CASE / "model", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    config = pipe.scheduler.config
    tensors = {}
    for name, (cls, changes) in SAMPLERS.items():
        pipe.scheduler = getattr(diffusers, cls).from_config(config, **changes)
        out = pipe("a cat", height=24, width=32, num_inference_steps=6, guidance_scale=7.5, output_type="latent",
                   generator=torch.Generator().manual_seed(7))
        tensors[name] = out.images.float().contiguous()
        assert tensors[name].isfinite().all()
    save_file(tensors, CASE / "samplers.safetensors")


if __name__ == "__main__":
    main()
