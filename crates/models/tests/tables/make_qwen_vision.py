#!/usr/bin/env python3
"""Writes qwen_vision.json: what transformers' Qwen2.5-VL sees in a few pictures, and what it makes of texts with them.

    pip install torch transformers
    python make_qwen_vision.py
"""
import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
TEXT = {"model_type": "qwen2_5_vl_text", "vocab_size": 19, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"mrope_section": [2, 3, 1], "rope_theta": 1000000.0, "rope_type": "default", "type": "mrope"}}
IDS = {"image_token_id": 17, "vision_start_token_id": 15, "vision_end_token_id": 16, "video_token_id": 18}
VISION = {"depth": 3, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 12, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 12, "fullatt_block_indexes": [1], "tokens_per_second": 2}
CASES = [
    # Sizes in pixels; a token has 4 by 4, a window 3 by 3 tokens.
    (VISION, [[(24, 24)], [(32, 28)], [(8, 4)], [(4, 40), (28, 16)]]),
    ({**VISION, "depth": 1, "num_heads": 1, "hidden_size": 8, "patch_size": 3, "spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 12, "fullatt_block_indexes": [3]}, [[(15, 24)]]),
]


def numbers(tensor):
    return [float(f"{x:.9g}") for x in tensor.flatten().tolist()]


def main():
    cases = []
    for seed, (vision, pictures_of_runs) in enumerate(CASES):
        config = {"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": vision, **IDS}
        model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.4).to(torch.bfloat16).float())
        weights = {name: {"shape": list(p.shape), "bf16": "".join(f"{b & 0xFFFF:04x}" for b in p.to(torch.bfloat16).view(torch.int16).flatten().tolist())} for name, p in model.state_dict().items()}
        if seed == 1:
            weights = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): w for name, w in weights.items()}
        model = model.double().eval()
        p, m, t = vision["patch_size"], vision["spatial_merge_size"], vision["temporal_patch_size"]
        runs = []
        for pictures in pictures_of_runs:
            patches, grids, ids = [], [], [3, 5, 7]
            for width, height in pictures:
                i = torch.arange(width * height * 3)
                x = ((37 * i + i * i // 11) % 101).float() / 50 - 1
                rows, columns = height // p, width // p
                x = x.reshape(rows // m, m, p, columns // m, m, p, 3).permute(0, 3, 1, 4, 6, 2, 5)
                patches.append(x.unsqueeze(5).expand(-1, -1, -1, -1, -1, t, -1, -1).reshape(rows * columns, -1).double())
                grids.append([1, rows, columns])
                ids += [15] + [17] * (rows * columns // m**2) + [16]
            ids += [4, 4, 9]
            grid, input_ids = torch.tensor(grids), torch.tensor([ids])
            with torch.no_grad():
                seen = model.model.visual(torch.cat(patches), grid_thw=grid).pooler_output
                seen = seen.split([g[1] * g[2] // m**2 for g in grids])
                call = dict(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), pixel_values=torch.cat(patches), image_grid_thw=grid, output_hidden_states=True)
                as_text = model(**call).hidden_states[-1]
                spatial = model(**call, mm_token_type_ids=(input_ids == 17).int()).hidden_states[-1]
            assert not torch.equal(as_text, spatial)
            runs.append({"pictures": [{"width": w, "height": h} for w, h in pictures], "ids": ids, "pad": 17, "seen": [numbers(s) for s in seen], "as_text": numbers(as_text), "spatial": numbers(spatial)})
        cases.append({"config": config, "weights": weights, "runs": runs})
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases}
    (HERE / "qwen_vision.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
