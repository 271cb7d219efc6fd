#!/usr/bin/env python3
"""Writes noise.json and flow_euler.json: what torch and diffusers compute, for the tests of this crate.

    pip install torch diffusers
    python make_tables.py
"""
import json
from pathlib import Path

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

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


if __name__ == "__main__":
    (HERE / "noise.json").write_text(json.dumps(noise(), separators=(",", ":")) + "\n")
    (HERE / "flow_euler.json").write_text(json.dumps(flow_euler(), separators=(",", ":")) + "\n")
