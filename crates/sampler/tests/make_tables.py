#!/usr/bin/env python3
"""Writes noise.json, flow_euler.json and discrete.json: what torch and diffusers compute, for the tests of this crate.

    pip install torch diffusers
    python make_tables.py           # all of them
    python make_tables.py discrete  # or some
"""
import json
import sys
from pathlib import Path

import diffusers
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

HERE = Path(__file__).resolve().parent
VERSIONS = {"torch": torch.__version__, "diffusers": diffusers.__version__}


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


def noise():
    whole = [
        {"seed": seed, "values": torch.randn(n, generator=generator(seed)).tolist()}
        for seed, n in [(0, 1), (0, 2), (1, 3), (1234, 15), (1234, 16), (1234, 17), (7, 31), (7, 33), (42, 100),
                        (2**32 - 1, 40), (2**32 + 5, 20), (2**64 - 1, 20), (2**64 - 1, 4)]
    ]
    # Long draws run through every branch of the vector code; every 61st value and the last 40 are kept.
    sampled = []
    for seed, n in [(1234, 16 * 128 * 128), (99, 50003)]:
        x = torch.randn(n, generator=generator(seed))
        sampled.append({"seed": seed, "n": n, "stride": 61, "values": x[::61].tolist(), "tail": x[-40:].tolist()})
    g = generator(5)
    draws = [torch.randn(n, generator=g).tolist() for n in (3, 5, 20, 2, 1, 16, 4)]
    return {"versions": VERSIONS, "whole": whole, "sampled": sampled, "consecutive": {"seed": 5, "draws": draws}}


def flow_euler():
    cases = []
    for config in ({}, {"shift": 3.0}, {"shift": 6.0}, {"shift": 1.15, "num_train_timesteps": 1000},
                   {"shift": 3.0, "num_train_timesteps": 500}, {"shift": 0.5}):
        for n_steps in (1, 2, 3, 4, 7, 20, 28, 50, 1000):
            if n_steps == 1000 and config != {"shift": 3.0}:
                continue
            scheduler = FlowMatchEulerDiscreteScheduler(**config)
            scheduler.set_timesteps(n_steps)
            sample, prediction = torch.tensor([0.7, -1.3]), torch.tensor([1.9, 0.4])
            stepped = [sample.tolist()]
            for t in scheduler.timesteps if n_steps < 100 else []:
                sample = scheduler.step(prediction, t, sample).prev_sample
                stepped.append(sample.tolist())
            cases.append({"config": config, "n_steps": n_steps, "timesteps": scheduler.timesteps.tolist(),
                          "sigmas": scheduler.sigmas.tolist(), "prediction": prediction.tolist(), "stepped": stepped})
    return {"versions": VERSIONS, "cases": cases}


SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# scheduler_config.json of Stable Diffusion 1.5 as published.
SD15 = {"_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012,
        "beta_schedule": "scaled_linear", "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False,
        "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None, "clip_sample": False}
# And of Stable Diffusion 2.1, by its class.
SD21 = {"_class_name": "DDIMScheduler", "_diffusers_version": "0.8.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "beta_start": 0.00085, "clip_sample": False, "num_train_timesteps": 1000, "prediction_type": "v_prediction",
        "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None}
SD21_EULER = {**SD, "_class_name": "EulerDiscreteScheduler", "prediction_type": "v_prediction", "steps_offset": 1,
              "timestep_spacing": "leading", "clip_sample": False}
EMOJI = {**SD, "clip_sample": False, "prediction_type": "v_prediction", "set_alpha_to_one": False, "steps_offset": 1,
         "timestep_spacing": "trailing"}
V = {"prediction_type": "v_prediction"}
X = {"prediction_type": "sample"}
LEADING, LINSPACE, TRAILING = ({"timestep_spacing": name} for name in ("leading", "linspace", "trailing"))
ZERO = {"rescale_betas_zero_snr": True}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}
MANY, FEW = (1, 2, 4, 7, 20, 50, 999, 1000), (1, 4, 7, 20)


def discrete():
    unclipped = [
        ({}, FEW), ({"steps_offset": 1}, FEW), (LINSPACE, FEW), (TRAILING, FEW), (V, FEW), (X, FEW), (X | TRAILING, FEW),
        (COSINE, FEW), (COSINE | V | LINSPACE, FEW), (COSINE | V | TRAILING | ZERO, FEW), (SD | ZERO, FEW),
        (SD | V | TRAILING | ZERO | {"num_train_timesteps": 500}, (1, 3, 500)), (SD | X | LINSPACE | ZERO, (1, 4)),
        (SD | V | TRAILING | ZERO, MANY), (SD | LINSPACE, MANY), (SD | TRAILING, (61, 999)), (SD | {"set_alpha_to_one": False}, MANY),
        ({"trained_betas": [0.01, 0.02, 0.05, 0.1, 0.2, 0.4], "num_train_timesteps": 6}, (1, 2, 5, 6)),
        ({"num_train_timesteps": 1} | V, (1,)),
    ]
    cases = [(DDIMScheduler, config | {"clip_sample": False}, counts) for config, counts in unclipped]
    cases += [(DDIMScheduler, EMOJI, MANY), (DDIMScheduler, SD15, MANY[:-1]), (DDIMScheduler, SD21, FEW),
              (DDIMScheduler, SD21_EULER, FEW)]
    karras, exponential = {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}
    ends = {"sigma_min": 0.002, "sigma_max": 700.0}
    cases += [(EulerDiscreteScheduler, config, counts) for config, counts in [
        ({}, FEW), (LEADING, FEW), (LEADING | {"steps_offset": 1}, FEW), (TRAILING, FEW), (V, FEW), (X, FEW), (COSINE | V, FEW),
        (SD, MANY), (SD | LEADING | {"steps_offset": 1}, MANY), (SD | TRAILING, (4, 61, 999)), (SD | V | TRAILING | ZERO, MANY),
        (SD | V | LEADING | ZERO, FEW), (SD | ZERO | TRAILING | {"num_train_timesteps": 500}, (1, 3, 500)),
        (SD | {"final_sigmas_type": "sigma_min"}, FEW), (SD | {"final_sigmas_type": "sigma_min"} | X | LEADING, FEW),
        (SD | karras, FEW), (SD | karras | LEADING | V, (1, 20, 50)), (SD | karras | {"sigma_min": 0.05, "sigma_max": 10.0}, FEW),
        (SD | exponential, FEW), (SD | exponential | TRAILING | V, FEW),
        # Stable Video Diffusion.
        (SD | karras | ends | V | LEADING | {"steps_offset": 1, "timestep_type": "continuous"}, (1, 7, 25)),
        (SD | V | {"timestep_type": "continuous"}, FEW), (SD | {"timestep_type": "continuous"}, (4,)),
        (SD | {"interpolation_type": "log_linear"}, FEW), (SD | {"interpolation_type": "log_linear"} | karras, FEW),
        ({"trained_betas": [0.01, 0.02, 0.05, 0.1, 0.2, 0.4], "num_train_timesteps": 6}, (1, 2, 5, 6)),
        (SD15, MANY), (SD21, FEW), (SD21_EULER, MANY),
    ]]
    g = generator(11)
    noise, predictions = torch.randn(2, generator=g), torch.randn(5, 2, generator=g)
    return {"versions": VERSIONS, "noise": noise.tolist(), "predictions": predictions.tolist(),
            "cases": [discrete_case(cls, config, n_steps, noise, predictions)
                      for cls, config, counts in cases for n_steps in counts]}


def discrete_case(cls, config, n_steps, noise, predictions):
    def f32(values):
        return [float(f"{value:.9g}") for value in values.tolist()]

    scheduler = cls.from_config({"_class_name": cls.__name__} | config)
    scheduler.set_timesteps(n_steps)
    is_euler = cls is EulerDiscreteScheduler
    # numpy.arange rounds a stray timestep of -1 into some step counts of "trailing".
    is_stray = len(scheduler.timesteps) == n_steps + 1
    assert len(scheduler.timesteps) == n_steps + is_stray and (not is_stray or scheduler.timesteps[-1] == -1)
    timesteps = scheduler.timesteps[:n_steps]
    if is_euler:
        scheduler.set_begin_index(0)
        sigmas = scheduler.sigmas[:n_steps + 1]
    else:
        alphas = scheduler.alphas_cumprod[timesteps].double()
        sigmas = ((1 - alphas) / alphas).sqrt()
    kept = sorted({*range(0, n_steps, max(1, n_steps // 50)), *range(max(0, n_steps - 3), n_steps)})
    latents = noise * scheduler.init_noise_sigma
    steps = []
    for idx, t in enumerate(timesteps):
        scale = scheduler.scale_model_input(torch.ones(1), t)
        stepped = scheduler.step(predictions[idx % 5], t, latents).prev_sample
        # Euler goes to another sigma where a stray timestep follows.
        if idx in kept and not (is_stray and is_euler and idx + 1 == n_steps):
            assert stepped.isfinite().all()
            steps.append([idx, *f32(torch.stack([t.float(), scale[0]])), f32(latents), f32(stepped)])
        latents = stepped
    init = torch.as_tensor(scheduler.init_noise_sigma)[None]
    kept_sigmas = [[idx, *f32(sigmas[idx:idx + 1])] for idx in [*kept, *([n_steps] if is_euler and not is_stray else [])]]
    for pair in kept_sigmas:
        pair[1] = None if pair[1] == float("inf") else pair[1]
    return {"sampler": "euler" if is_euler else "ddim", "config": config, "n_steps": n_steps,
            "init_noise_scale": f32(init)[0], "sigmas": kept_sigmas, "steps": steps}


if __name__ == "__main__":
    for table in [noise, flow_euler, discrete]:
        if table.__name__ in (sys.argv[1:] or ["noise", "flow_euler", "discrete"]):
            (HERE / f"{table.__name__}.json").write_text(json.dumps(table(), separators=(",", ":")) + "\n")
