#!/usr/bin/env python3
"""Writes t5_encoder.json: what transformers' T5EncoderModel and UMT5EncoderModel make of a few ids, for several configurations, and its buckets of distances.

    pip install torch transformers
    python make_t5_encoder.py

Weights are drawn from a seed, rounded to bfloat16 and written by name as the 16 bits of each, in hex.
"""
import json
from pathlib import Path

import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

HERE = Path(__file__).resolve().parent

BASE = {"vocab_size": 9, "d_model": 10, "d_kv": 3, "d_ff": 7, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
VARIANTS = [
    {},
    {"feed_forward_proj": "relu", "d_kv": 8, "num_heads": 3},
    {"feed_forward_proj": "gated-silu", "num_layers": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6},
    {"feed_forward_proj": "gelu", "num_heads": 1, "d_kv": 5, "layer_norm_epsilon": 0.5},
    {"feed_forward_proj": "gated-relu", "relative_attention_num_buckets": 5, "relative_attention_max_distance": 2},
]
UMT5_VARIANTS = [
    {},
    {"num_layers": 3, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6},
]
IDS = [3, 8, 1, 0, 0, 5, 3, 3, 2, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4]
# Ids, and how many of them a mask lets be seen (None: no mask).
RUNS = [(IDS, None), ([1], None), (IDS, 13), (IDS[:6], 1)]


def main():
    cases = []
    kinds = [("t5", variant) for variant in VARIANTS] + [("umt5", variant) for variant in UMT5_VARIANTS]
    for seed, (kind, variant) in enumerate(kinds):
        config = {**BASE, **variant}
        if kind == "t5":
            model = transformers.T5EncoderModel(transformers.T5Config(**config)).eval()
        else:
            model = transformers.UMT5EncoderModel(transformers.UMT5Config(**config)).eval()
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                around = 1.0 if "norm" in name else 0.0
                drawn = around + 0.4 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn.to(torch.bfloat16).float())
                bits = parameter.to(torch.bfloat16).view(torch.int16).flatten().tolist()
                weights[name] = {"shape": list(parameter.shape), "bf16": "".join(f"{b & 0xFFFF:04x}" for b in bits)}
            # In double precision, so that the numbers are the same on every processor.
            model = model.double()
            runs = []
            for ids, n_seen in RUNS:
                mask = None if n_seen is None else torch.tensor([[int(i < n_seen) for i in range(len(ids))]])
                output = model(torch.tensor([ids]), attention_mask=mask)[0].flatten().tolist()
                runs.append({"ids": ids, "n_seen": n_seen or len(ids), "output": [float(f"{x:.9g}") for x in output]})
        cases.append({"config": {"model_type": kind, **config}, "weights": weights, "runs": runs})
    distances = torch.arange(-600, 601)
    buckets = []
    for n_buckets, max_distance in [(32, 128), (8, 16), (5, 2), (64, 256), (33, 100), (4, 2)]:
        of = T5Attention._relative_position_bucket(distances, True, n_buckets, max_distance)
        buckets.append([n_buckets, max_distance, of.tolist()])
    table = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "cases": cases, "buckets": buckets}
    (HERE / "t5_encoder.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
