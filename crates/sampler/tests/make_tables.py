#!/usr/bin/env python3
"""Writes noise.json, flow_euler.json, discrete.json and trajectories.json: what torch and diffusers compute, for the tests of this crate.

    pip install torch diffusers scipy
    python make_tables.py           # all of them
    python make_tables.py discrete  # or some
"""
import json
import sys
from pathlib import Path

import diffusers
import numpy as np
import scipy
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

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


# What a pipeline hands to a flow's scheduler, by name: sigmas from 1 to 1 / n as numpy or torch makes them, mu by either rule.
def numpy_sigmas(n):
    return np.linspace(1.0, 1 / n, n)


def torch_sigmas(n):
    return torch.linspace(1.0, 1 / n, n).tolist()


def linear_mu(config, n_tokens, n_steps):
    keys = ("base_image_seq_len", 256), ("max_image_seq_len", 4096), ("base_shift", 0.5), ("max_shift", 1.15)
    return calculate_shift(n_tokens, *(config.get(key, default) for key, default in keys))


def flux2_mu(config, n_tokens, n_steps):
    return compute_empirical_mu(n_tokens, n_steps)


FLUX = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
        "max_image_seq_len": 4096}
QWEN = FLUX | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
WAN = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SANA = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SDXL = SD | {"clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
             "timestep_spacing": "leading", "interpolation_type": "linear", "sample_max_value": 1.0,
             "use_karras_sigmas": False}
KARRAS, EXPONENTIAL, BETA = ({f"use_{name}_sigmas": True} for name in ("karras", "exponential", "beta"))
SIGMA_MIN = {"final_sigmas_type": "sigma_min"}


def trajectory_cases():
    """Name, class, configuration, step counts, and what else is asked for."""
    def sde(config):
        return config | {"algorithm_type": "sde-dpmsolver++"}

    both = [("unipc", UniPCMultistepScheduler), ("dpm++-2m", DPMSolverMultistepScheduler)]
    for name, cls in both:
        for config, counts in [({}, FEW), (SD, (1, 2, 3, 5, 14, 15, 20, 50)), (SDXL, FEW), (SD | LEADING | {"steps_offset": 1}, FEW),
                               (SD | TRAILING, FEW), (SD | V | TRAILING | ZERO, FEW), (SD | X, FEW), (SD | V, FEW),
                               (COSINE, (4, 20)), (SD | SIGMA_MIN, FEW), (SD | {"solver_order": 1}, FEW),
                               (SD | {"solver_order": 3}, (1, 2, 3, 4, 7, 20, 30)), (SD | SIGMA_MIN | {"lower_order_final": False}, FEW),
                               (SD | KARRAS, FEW), (SD | EXPONENTIAL, FEW), (SD | BETA, FEW), (SD | KARRAS | SIGMA_MIN, FEW)]:
            yield name, cls, config, counts, {}
        for strength in (0.3, 0.8, 1.0):
            yield name, cls, SDXL, (4, 10, 25), {"strength": strength}
            yield name, cls, SANA, (4, 10, 25), {"strength": strength, "kind": "flow"}
        for shift in (1.0, 3.0, 5.0, 12.0):
            yield name, cls, SANA | {"flow_shift": shift}, (1, 2, 3, 4, 8, 20, 30, 50), {"kind": "flow"}
        yield name, cls, SANA | {"solver_order": 3}, (3, 10, 30), {"kind": "flow"}
        yield name, cls, SANA | {"use_dynamic_shifting": True}, (4, 20), {"kind": "flow", "n_tokens": 1024, "mu": "linear"}
    for config, counts in [({"predict_x0": False} | SIGMA_MIN, (4, 20)), ({"solver_type": "bh1"} | SIGMA_MIN, FEW),
                           ({"disable_corrector": [0, 2]}, (4, 20)), ({"sigma_min": 0.05, "sigma_max": 10.0} | KARRAS, FEW),
                           ({"solver_order": 4}, (20,))]:
        yield "unipc", UniPCMultistepScheduler, SD | config, counts, {}
    yield "unipc", UniPCMultistepScheduler, WAN | {"solver_type": "bh1"} | SIGMA_MIN, (4, 20), {"kind": "flow"}
    yield "unipc", UniPCMultistepScheduler, WAN | {"shift_terminal": 0.1}, (4, 20), {"kind": "flow"}
    yield "unipc", UniPCMultistepScheduler, WAN | KARRAS, (4, 20), {"kind": "flow"}
    yield ("unipc", UniPCMultistepScheduler, WAN | {"use_dynamic_shifting": True, "time_shift_type": "linear"}, (4, 20),
           {"kind": "flow", "n_tokens": 1024, "mu": "linear"})
    for config, counts in [({"solver_type": "heun"}, FEW), ({"euler_at_final": True, "solver_order": 3} | SIGMA_MIN, (7, 20)),
                           ({"use_lu_lambdas": True}, FEW), ({"lambda_min_clipped": -5.1} | COSINE, FEW),
                           ({"lambda_min_clipped": -5.1} | COSINE | KARRAS, FEW)]:
        yield "dpm++-2m", DPMSolverMultistepScheduler, SD | config, counts, {}
    for config, counts in [({}, FEW), (V | TRAILING | ZERO, FEW), ({"solver_type": "heun"}, FEW), (KARRAS, FEW),
                           ({"solver_order": 1}, FEW), (SIGMA_MIN | {"lower_order_final": False}, FEW)]:
        yield "dpm++-2m-sde", DPMSolverMultistepScheduler, sde(SD | config), counts, {}
    yield "dpm++-2m-sde", DPMSolverMultistepScheduler, sde(SANA), (1, 4, 20), {"kind": "flow"}
    yield "dpm++-2m-sde", DPMSolverMultistepScheduler, sde(SDXL), (10,), {"strength": 0.6}
    yield "ddim", DDIMScheduler, SDXL, (10, 25), {"strength": 0.3}
    yield "ddim", DDIMScheduler, SDXL, (10, 25), {"strength": 0.7}
    for strength in (0.3, 0.8, 1.0):
        yield "euler", EulerDiscreteScheduler, SDXL, (4, 10, 25), {"strength": strength}
    for config in (BETA, BETA | V | TRAILING, KARRAS | LEADING, EXPONENTIAL):
        yield "euler", EulerDiscreteScheduler, SD | config, FEW, {}
    yield "euler", EulerDiscreteScheduler, SD | TRAILING, (1, 2, 4, 8), {}
    yield "euler", EulerDiscreteScheduler, SDXL, (), {"sigmas": [14.6, 8.5, 3.25, 1.0, 0.2, 0.0]}
    yield "euler", EulerDiscreteScheduler, SDXL | V, (), {"sigmas": [14.6, 8.5, 3.25, 1.0, 0.2]}
    yield "dpm++-3m-sde", DPMSolverMultistepScheduler, sde(SD | {"solver_order": 3}), (3, 7, 20), {}
    yield "dpm-solver", DPMSolverMultistepScheduler, SD | {"algorithm_type": "dpmsolver"} | SIGMA_MIN, FEW, {}
    for config in (X, V, {"solver_order": 3}, {"solver_type": "heun"}):
        yield "dpm-solver", DPMSolverMultistepScheduler, SD | {"algorithm_type": "dpmsolver"} | SIGMA_MIN | config, (4, 20), {}
    for config in ({}, {"solver_type": "heun"}):
        yield ("dpm-solver-sde", DPMSolverMultistepScheduler, SD | {"algorithm_type": "sde-dpmsolver"} | SIGMA_MIN | config,
               (4, 20), {})

    single = DPMSolverSinglestepScheduler
    for config, counts in [({}, (1, 2, 3, 4, 7, 20)), (V | KARRAS, FEW), ({"solver_order": 3}, (1, 2, 3, 4, 5, 6, 20)),
                           ({"solver_order": 3, "solver_type": "heun"}, (4, 6, 20)), ({"solver_type": "heun"}, FEW),
                           ({"solver_order": 1}, FEW), (SIGMA_MIN, (2, 4, 20)), (SIGMA_MIN | {"solver_order": 3}, (3, 6, 21)),
                           (EXPONENTIAL, FEW), (BETA, FEW)]:
        yield "dpm++-2s", single, SD | config, counts, {}
        yield "dpm++-sde", single, sde(SD | config), counts, {}
    for config in ({}, {"solver_order": 3}, {"solver_order": 3, "solver_type": "heun"}, X, V):
        yield "dpm-solver-2s", single, SD | {"algorithm_type": "dpmsolver"} | SIGMA_MIN | config, (4, 21), {}
    for strength in (0.3, 0.8, 1.0):
        yield "dpm++-2s", single, SDXL, (4, 10, 25), {"strength": strength}
        yield "dpm++-sde", single, sde(SDXL), (4, 10, 25), {"strength": strength}

    for name, cls in [("euler-a", EulerAncestralDiscreteScheduler), ("heun", HeunDiscreteScheduler), ("ddpm", DDPMScheduler),
                      ("pndm", PNDMScheduler), ("lcm", LCMScheduler), ("tcd", TCDScheduler), ("lms", LMSDiscreteScheduler),
                      ("dpm2", KDPM2DiscreteScheduler), ("dpm2-a", KDPM2AncestralDiscreteScheduler),
                      ("deis", DEISMultistepScheduler)]:
        for config in (SDXL, SDXL | V, SDXL | TRAILING, SDXL | LINSPACE):
            yield name, cls, config, (1, 2, 3, 4, 7, 20, 50), {}
        for strength in (0.3, 0.8, 1.0):
            yield name, cls, SDXL, (4, 10, 25), {"strength": strength}
    yield "euler-a", EulerAncestralDiscreteScheduler, SD | V | TRAILING | ZERO, FEW, {}
    for config in (X, KARRAS, EXPONENTIAL, BETA, KARRAS | LEADING | V):
        yield "heun", HeunDiscreteScheduler, SD | config, FEW, {}
    yield "heun", HeunDiscreteScheduler, {}, FEW, {}
    yield "lms", LMSDiscreteScheduler, SD | X, FEW, {}
    for config in (KARRAS, EXPONENTIAL, BETA, KARRAS | LEADING | V):
        yield "lms", LMSDiscreteScheduler, SD | config, FEW, {}
        yield "dpm2", KDPM2DiscreteScheduler, SD | config, FEW, {}
        yield "dpm2-a", KDPM2AncestralDiscreteScheduler, SD | config, FEW, {}
        yield "deis", DEISMultistepScheduler, SD | config, FEW, {}
    for config in (X, COSINE, {"solver_order": 1}, {"solver_order": 3}, {"lower_order_final": False}):
        yield "deis", DEISMultistepScheduler, SD | config, (1, 2, 4, 7, 20, 50), {}
    for shift in (1.0, 3.0):
        yield "deis", DEISMultistepScheduler, SANA | {"flow_shift": shift}, (1, 4, 20), {"kind": "flow"}
    for name, cls, config in [("euler-karras", EulerDiscreteScheduler, KARRAS), ("euler-trailing", EulerDiscreteScheduler, TRAILING),
                              ("euler-a-trailing", EulerAncestralDiscreteScheduler, TRAILING),
                              ("dpm++-2m-karras", DPMSolverMultistepScheduler, KARRAS),
                              ("dpm++-2m-sde-exponential", DPMSolverMultistepScheduler, EXPONENTIAL | {"algorithm_type": "sde-dpmsolver++"}),
                              ("unipc-beta", UniPCMultistepScheduler, BETA)]:
        yield name, cls, SDXL | config, (4, 20), {"written": SDXL}
    yield "ddpm", DDPMScheduler, SDXL, (999,), {}
    for config in (X, {"variance_type": "fixed_large"}, V | TRAILING | ZERO, COSINE | {"set_alpha_to_one": True}):
        yield "ddpm", DDPMScheduler, SDXL | config, (4, 20), {}
    yield "ddpm", DDPMScheduler, SDXL | {"variance_type": "fixed_small_log"}, (4, 20), {}
    for config in ({}, V, TRAILING, {"set_alpha_to_one": True}):
        yield "pndm", PNDMScheduler, SDXL | {"skip_prk_steps": False} | config, (4, 7, 20, 50), {}
    yield "pndm", PNDMScheduler, SDXL | {"skip_prk_steps": False}, (10, 25), {"strength": 0.8}
    for name, cls in [("lcm", LCMScheduler), ("tcd", TCDScheduler)]:
        for config in ({}, X, {"original_inference_steps": 100}, V | ZERO):
            yield name, cls, config, (1, 2, 4, 8, 30), {}
    yield "lcm", LCMScheduler, {"timestep_scaling": 0.5}, (4,), {}

    yield "flow-heun", FlowMatchHeunDiscreteScheduler, {"shift": 3.0}, (1, 2, 4, 20), {"kind": "flow"}
    for strength in (0.3, 0.8, 1.0):
        yield "flow-heun", FlowMatchHeunDiscreteScheduler, {"shift": 3.0}, (4, 10, 28), {"kind": "flow", "strength": strength}

    flow = FlowMatchEulerDiscreteScheduler
    own = {"kind": "flow"}
    for config in ({}, {"shift": 3.0}, {"shift": 3.0, "num_train_timesteps": 500},
                   {"shift": 3.0} | KARRAS, {"shift": 3.0} | EXPONENTIAL, {"shift": 3.0} | BETA,
                   {"shift": 3.0, "stochastic_sampling": True}):
        yield "flow-euler", flow, config, FEW, own
    # Alone, the terminal sigma of a single step makes no schedule.
    yield "flow-euler", flow, {"shift": 3.0, "shift_terminal": 0.1}, FEW[1:], own
    for strength in (0.3, 0.6, 0.8, 1.0):
        yield "flow-euler", flow, {"shift": 3.0}, (4, 10, 28), own | {"strength": strength}
    for n_tokens in (16, 256, 1024, 4096, 8100):
        counts = (1, 4, 28)
        yield "flow-euler", flow, FLUX, counts, own | {"n_tokens": n_tokens, "mu": "linear", "flow_sigmas": "numpy"}
        yield "flow-euler", flow, FLUX, counts, own | {"n_tokens": n_tokens, "mu": "flux2", "flow_sigmas": "numpy"}
        yield "flow-euler", flow, QWEN, counts[1:], own | {"n_tokens": n_tokens, "mu": "linear", "flow_sigmas": "numpy"}
    yield "flow-euler", flow, FLUX, (4, 20), own | {"n_tokens": 1024, "mu": "linear"}
    yield ("flow-euler", flow, FLUX | {"time_shift_type": "linear"}, (4, 20),
           own | {"n_tokens": 1024, "mu": "linear", "flow_sigmas": "numpy"})
    yield "flow-euler", flow, FLUX, (10,), own | {"n_tokens": 1024, "mu": "linear", "flow_sigmas": "numpy", "strength": 0.6}
    yield "flow-euler", flow, {"shift": 1.0}, (1, 4), own | {"flow_sigmas": "numpy"}
    yield "flow-euler", flow, {"shift": 3.0}, (1, 8, 9, 50), own | {"flow_sigmas": "torch"}
    yield "flow-euler", flow, {"shift": 3.0}, (), own | {"sigmas": [1.0, 0.9, 0.5, 0.25, 0.1]}


class Draws:
    """Stands in for randn_tensor: the rows of a table, one after another."""

    def __init__(self, rows):
        self.rows, self.next = rows, 0

    def __call__(self, shape, **_):
        row = self.rows[self.next % len(self.rows)].reshape(shape)
        self.next += 1
        return row


def step(scheduler, prediction, t, x):
    """TCD's own default draws noise that pipelines turn off."""
    kwargs = {"eta": 0.0} if isinstance(scheduler, TCDScheduler) else {}
    return scheduler.step(prediction, t, x, **kwargs).prev_sample


def model(x, t, drift):
    """A denoiser of no depth: in float64, so that rounding does not tell two of them apart."""
    x = x.double()
    y = (0.7 * x + 0.2 * x.roll(-1, -1) + drift.double() * (float(t) / 1000)) / (1 + 0.05 * x * x)
    return y.float()


def trajectories():
    g = generator(12)
    image, noise, drift = (torch.randn(1, 4, generator=g) for _ in range(3))
    draws = torch.randn(13, 4, generator=g)
    cases = [trajectory(*case, n_steps, image, noise, drift, draws)
             for *case, counts, asked in trajectory_cases()
             for case in [[*case, asked]] for n_steps in counts or (len(asked["sigmas"]),)]
    return {"versions": VERSIONS | {"scipy": scipy.__version__}, "image": image[0].tolist(), "noise": noise[0].tolist(),
            "drift": drift[0].tolist(), "draws": draws.tolist(), "cases": cases}


def f32s(values):
    return [float(f"{value:.9g}") for value in torch.as_tensor(values).flatten().tolist()]


def trajectory(name, cls, config, asked, n_steps, image, noise, drift, draws):
    scheduler = cls.from_config({"_class_name": cls.__name__} | config)
    is_flow = asked.get("kind") == "flow"
    kwargs = {}
    if "mu" in asked and config.get("use_dynamic_shifting"):
        rule = {"linear": linear_mu, "flux2": flux2_mu}[asked["mu"]]
        kwargs["mu"] = rule(config, asked["n_tokens"], n_steps)
    if "flow_sigmas" in asked:
        kwargs["sigmas"] = {"numpy": numpy_sigmas, "torch": torch_sigmas}[asked["flow_sigmas"]](n_steps)
    if "sigmas" in asked:
        scheduler.set_timesteps(sigmas=asked["sigmas"], **kwargs)
    elif "sigmas" in kwargs:
        scheduler.set_timesteps(**kwargs)
    else:
        scheduler.set_timesteps(n_steps, **kwargs)
    first, strength = 0, asked.get("strength")
    if strength is not None:
        if is_flow:
            first = int(max(n_steps - min(n_steps * strength, n_steps), 0))
        else:
            first = max(n_steps - min(int(n_steps * strength), n_steps), 0)
        if first == n_steps:
            return {"sampler": name, "config": config, "asked": asked, "n_steps": n_steps, "timesteps": None}
        first *= scheduler.order
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    timesteps = scheduler.timesteps[first:]
    noised = scheduler.scale_noise if hasattr(scheduler, "scale_noise") else scheduler.add_noise

    def factors(t):
        one, zero = torch.ones(1, 1), torch.zeros(1, 1)
        if noised.__name__ == "scale_noise":
            return f32s(torch.cat([noised(one, t, zero), noised(zero, t, one)]))
        return f32s(torch.cat([noised(one, zero, t), noised(zero, one, t)]))

    start = factors(timesteps[:1])
    init = float(torch.as_tensor(getattr(scheduler, "init_noise_sigma", 1.0)))
    x = noise * init if strength is None else start[0] * image + start[1] * noise
    steps, renoise = [], []
    module = sys.modules[cls.__module__]
    if hasattr(module, "randn_tensor"):
        module.randn_tensor = Draws(draws)
    scales = []
    for idx, t in enumerate(timesteps):
        scale = scheduler.scale_model_input(torch.ones(1, 1), t) if hasattr(scheduler, "scale_model_input") else torch.ones(1)
        scales += f32s(scale)
        x = step(scheduler, model(x * scale, t, drift), t, x)
        assert x.isfinite().all(), (name, config, asked, n_steps, idx)
        if idx < 4 or idx % 7 == 0 or idx + 3 > len(timesteps):
            steps.append([idx, f32s(x)])
        renoise.append(factors(timesteps[idx + 1:idx + 2]) if idx + 1 < len(timesteps) else [1.0, 0.0])
    sigmas = f32s(scheduler.sigmas[first:]) if hasattr(scheduler, "sigmas") else None
    return {"sampler": name, "config": asked.get("written", config), "asked": asked, "n_steps": n_steps, "timesteps": f32s(timesteps),
            "sigmas": sigmas, "input_scales": scales if set(scales) != {1.0} else None, "init_noise_scale": f32s(init)[0],
            "start": start, "renoise": [[idx, pair] for idx, pair in enumerate(renoise) if strength is not None and (idx % 5 == 0 or idx + 2 > len(renoise))], "steps": steps}


if __name__ == "__main__":
    for table in [noise, flow_euler, discrete, trajectories]:
        if table.__name__ in (sys.argv[1:] or ["noise", "flow_euler", "discrete", "trajectories"]):
            (HERE / f"{table.__name__}.json").write_text(json.dumps(table(), separators=(",", ":")) + "\n")
