#!/usr/bin/env python3
"""Writes chat.json: what diffusers' pipelines make of a prompt before it is cut into tokens, how many tokens of it they leave out, and a
chat template that does what Qwen3's does.

    pip install diffusers transformers torch
    python make_chat.py
"""
import inspect
import json
from pathlib import Path

import diffusers
import transformers
from diffusers import Flux2KleinPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline, ZImagePipeline

HERE = Path(__file__).resolve().parent
TEMPLATE = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
PROMPTS = ["a cat", "", " two\nlines {0} <|im_end|> \u00e9 "]


class Stop(Exception):
    pass


class Spy:
    """In place of a tokenizer or processor: keeps the text that it is given."""

    def __init__(self):
        self.tokenizer = transformers.Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])
        self.tokenizer.chat_template = TEMPLATE

    def apply_chat_template(self, *args, **kwargs):
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def __call__(self, text=None, images=None, **kwargs):
        self.text = text if isinstance(text, str) else text[0]
        raise Stop


def seen(call, spy):
    try:
        call()
    except Stop:
        return spy.text
    raise AssertionError("nobody asked the tokenizer")


def main():
    rows = []

    def add(kind, prompt, text, n_dropped=0, n_tokens=()):
        rows.append({"name": kind.__name__, "prompt": prompt, "text": text, "n_dropped": n_dropped, "n_tokens": list(n_tokens)})

    for prompt in PROMPTS:
        spy = Spy()
        add(Flux2KleinPipeline, prompt, seen(lambda: Flux2KleinPipeline._get_qwen3_prompt_embeds(spy_model(), spy, prompt), spy))
        z = object.__new__(ZImagePipeline)
        z.__dict__.update(tokenizer=spy)
        add(ZImagePipeline, prompt, seen(lambda: ZImagePipeline._encode_prompt(z, prompt, device="cpu"), spy))
        for kind in (QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline):
            lines = inspect.getsource(kind.__init__).splitlines()
            pipe = object.__new__(kind)
            for line in lines:
                if "self.prompt_template_encode" in line or "self.tokenizer_max_length" in line:
                    exec(line.strip(), {"self": Fields(pipe)})
            pipe.__dict__.update(tokenizer=spy, processor=spy, text_encoder=spy_model())
            image = {} if kind is QwenImagePipeline else {"image": None}
            text = seen(lambda: kind._get_qwen_prompt_embeds(pipe, prompt, device="cpu", dtype=object(), **image), spy)
            counts = [3] if kind is QwenImageEditPipeline else []
            add(kind, prompt, text.replace("<|image_pad|>", "<|image_pad|>" * 3), pipe.__dict__["prompt_template_encode_start_idx"], counts)
            if kind is QwenImageEditPlusPipeline:
                text = seen(lambda: kind._get_qwen_prompt_embeds(pipe, prompt, image=[None, None], device="cpu", dtype=object()), spy)
                add(kind, prompt, text.replace("<|image_pad|>", "<|image_pad|>" * 2), pipe.__dict__["prompt_template_encode_start_idx"], [2, 2])
    table = {"versions": {"diffusers": diffusers.__version__, "transformers": transformers.__version__}, "template": TEMPLATE, "rows": rows}
    (HERE / "chat.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


class Fields:
    """Sets fields of a pipeline past its own rules."""

    def __init__(self, pipe):
        object.__setattr__(self, "pipe", pipe)

    def __setattr__(self, name, value):
        self.pipe.__dict__[name] = value


def spy_model():
    return type("Model", (), {"dtype": None, "device": None})()


if __name__ == "__main__":
    main()
