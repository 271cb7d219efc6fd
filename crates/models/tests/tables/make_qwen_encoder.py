#!/usr/bin/env python3
"""Writes qwen_encoder.json: hidden states of transformers' Qwen3 and of the language model of Qwen2.5-VL for a few ids.

    pip install torch transformers
    python make_qwen_encoder.py
"""
import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent

QWEN3 = {"vocab_size": 23, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64}
QWEN3_VARIANTS = [
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    {"rope_theta": 1000000, "rope_scaling": None, "num_hidden_layers": 3, "num_key_value_heads": 1, "attention_bias": True, "rms_norm_eps": 0.01, "use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 3},
]
VL_TEXT = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16, "fullatt_block_indexes": [0]}
VL_VARIANTS = [
    {"text_config": {"model_type": "qwen2_5_vl_text", **VL_TEXT, "rope_parameters": {"mrope_section": [1, 1, 2], "rope_theta": 1000000.0, "rope_type": "default", "type": "mrope"}}, "vision_config": VISION},
    # As published checkpoints have it, flat.
    {**VL_TEXT, "num_key_value_heads": 2, "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "vision_config": VISION, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28},
]
IDS = [3, 8, 1, 0, 0, 5, 3, 3, 2, 7, 19, 22, 22, 22, 22, 22, 22]
# Ids, and how many of them are no padding.
RUNS = [(IDS, 17), (IDS, 11), ([4, 22, 22], 1), ([5], 1)]


def digits(parameter):
    return "".join(f"{b & 0xFFFF:04x}" for b in parameter.to(torch.bfloat16).view(torch.int16).flatten().tolist())


def randomised(model, seed):
    """The weights by the names of the files, as bfloat16; the model in double precision, so that the numbers are the same on every
    processor, but for the norms and rotary positions, which transformers has in single precision."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.5)).to(torch.bfloat16).float())
    weights = {name: {"shape": list(p.shape), "bf16": digits(p)} for name, p in model.state_dict().items()}
    return model.double().eval(), weights


def main():
    cases = []
    kinds = [("qwen3", v) for v in QWEN3_VARIANTS] + [("qwen2_5_vl", v) for v in VL_VARIANTS]
    for seed, (kind, variant) in enumerate(kinds):
        if kind == "qwen3":
            config = {**QWEN3, **variant}
            cls = transformers.Qwen3Model if seed == 0 else transformers.Qwen3ForCausalLM
            model = cls(transformers.Qwen3Config(**config))
        else:
            config = variant
            model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config))
        model, weights = randomised(model, seed)
        if kind == "qwen2_5_vl" and seed % 2 == 1:
            weights = {name.replace("model.language_model.", "model."): w for name, w in weights.items()}
        weights = {name: w for name, w in weights.items() if "visual" not in name}
        runs = []
        for ids, n_text in RUNS:
            mask = torch.tensor([[int(i < n_text) for i in range(len(ids))]])
            with torch.no_grad():
                states = model(input_ids=torch.tensor([ids]), attention_mask=mask, output_hidden_states=True).hidden_states
            runs.append({"ids": ids, "n_text": n_text, "states": [[float(f"{x:.9g}") for x in s.flatten().tolist()] for s in states]})
        cases.append({"config": {"model_type": kind, **config}, "weights": weights, "runs": runs})
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases}
    (HERE / "qwen_encoder.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
