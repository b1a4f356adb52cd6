"""Whole models of text and pictures, with clearhead's attention and with their own.

Each is a small random model with both halves. gold = its eager attention in float64, peer = the
same in float32. watch sees the halves whose weights a model does not return.
"""

import copy

import pytest
import torch
from test_hf_families import (  # noqa: F401, registered is a fixture
    HALVES,
    TOKENS,
    ids,
    registered,
    softmax_in_full,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import clearhead
from clearhead import AuxRequest, hf
from clearhead.testing import assert_within_budget

IMAGE, START, END = 45, 44, 46  # tokens that stand for a picture
TEXT = {
    **TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
LLAMA, CLIP = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0,
                                         "mrope_section": [1, 1, 2]}}  # fmt: skip
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "mlp_ratio": 2,
}
QWEN = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END,
        "video_token_id": 47}  # fmt: skip
BART = {"model_type": "bart", **TOKENS, "decoder_start_token_id": 2, **HALVES}
DAVIT = {
    "embed_dim": [8, 16],
    "num_heads": [2, 4],
    "num_groups": [2, 4],
    "depths": [1, 1],
    "patch_size": [4, 3],
    "patch_stride": [4, 2],
    "patch_padding": [1, 1],
    "patch_prenorm": [False, True],
    "window_size": 2,
    "projection_dim": 32,
    "max_position_embeddings": 4,
}

# name: (the text's half, the picture's, options, tokens that a picture takes up)
WRITERS = {
    "blip-2": ({"model_type": "opt", **TEXT, "ffn_dim": 40, "word_embed_proj_dim": 32}, VISION,
               {"qformer_config": {**TEXT, "encoder_hidden_size": 32}, "num_query_tokens": 4}, 4),
    "florence2": (BART, DAVIT, {}, 5),
    "gemma3": ({**TEXT, "sliding_window": 5}, SIGLIP, {"mm_tokens_per_image": 4}, 4),
    "idefics2": ({"model_type": "mistral", **TEXT}, VISION,
                 {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1,
                                       "resampler_n_heads": 4, "resampler_head_dim": 8,
                                       "num_key_value_heads": 2}}, 4),
    "idefics3": (LLAMA, VISION, {"scale_factor": 2}, 4),
    "internvl": ({"model_type": "qwen2", **TEXT},
                 {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
                 {"downsample_ratio": 0.5}, 4),
    "llava": (LLAMA, CLIP, {}, 16),
    "llava_next": (LLAMA, CLIP, {"image_grid_pinpoints": [[16, 16]]}, 36),
    "mistral3": ({"model_type": "mistral", **TEXT},
                 {"model_type": "pixtral", **VISION, "head_dim": 8},
                 {"spatial_merge_size": 2, "vision_feature_layer": -1}, 4),
    "mllama": ({**TEXT, "cross_attention_layers": [1]},
               {**VISION, "num_global_layers": 1, "attention_heads": 4, "max_num_tiles": 1,
                "vision_output_dim": 64, "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]]}, {}, 1),
    "paligemma": ({"model_type": "gemma", **TEXT}, SIGLIP, {"projection_dim": 32}, 16),
    "qwen2_vl": (QWEN_TEXT, QWEN_VISION, QWEN, 4),
    "qwen2_5_vl": (QWEN_TEXT, {**QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [1]},
                   QWEN, 4),
    "qwen3_vl": (QWEN_TEXT, {**QWEN_VISION, "num_position_embeddings": 16,
                             "deepstack_visual_indexes": [0]}, QWEN, 4),
    "smolvlm": (LLAMA, VISION, {"scale_factor": 2}, 4),
    "vipllava": (LLAMA, CLIP, {"vision_feature_layers": [-2, -1]}, 16),
}  # fmt: skip
PAIRS = {
    "altclip": {"projection_dim": 16},
    "chinese_clip": {"projection_dim": 16},
    "clip": {"projection_dim": 16},
    "metaclip_2": {"projection_dim": 16},
    "siglip": {},
    "siglip2": {},
}


def build(name, attention, state=None):
    """The small model of a family, in eval mode; the same weights whenever it is called."""
    if name in WRITERS:
        text, vision, options, _ = WRITERS[name]
        token = {"image_token_id": IMAGE, "image_token_index": IMAGE}
        kind, options = AutoModelForImageTextToText, {**token, **options}
    else:
        kind, text, vision, options = AutoModel, TEXT, VISION, PAIRS[name]
    if name == "siglip2":
        vision = {**vision, "num_patches": 16}
    parts = {"text_config": text, "vision_config": vision, **options}
    config = AutoConfig.for_model(name, **copy.deepcopy(parts))
    torch.manual_seed(1)
    model = kind.from_config(config, attn_implementation=attention).eval()
    if state is None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
    else:
        model.load_state_dict(state)
    return model


def inputs(name):
    """A batch of two texts, the first of them padded, with a picture each."""
    torch.manual_seed(2)
    size = WRITERS[name][3] if name in WRITERS else 0
    numbers = torch.randint(5, START, (2, 9 + size))
    numbers[:, 4 : 4 + size] = IMAGE
    mask = torch.ones_like(numbers)
    mask[0, slice(3) if size else slice(-4, None)] = 0
    given = {
        "input_ids": numbers.masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    is_image = (numbers == IMAGE).int()
    two, patches = torch.tensor([[16, 16], [16, 16]]), torch.tensor([[4, 4], [4, 4]])
    if name in ("idefics2", "idefics3", "smolvlm"):
        given["pixel_values"] = given["pixel_values"][:, None]
    elif name in ("llava_next", "mistral3"):
        given["image_sizes"] = two
        if name == "llava_next":
            given["pixel_values"] = torch.randn(2, 2, 3, 16, 16)
    elif name == "gemma3":
        given["token_type_ids"] = is_image
    elif name.startswith("qwen"):
        given["pixel_values"] = torch.randn(32, 48)
        given["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        given["mm_token_type_ids"] = is_image
        given["input_ids"][:, 3], given["input_ids"][:, 8] = START, END
    elif name == "mllama":
        given["pixel_values"] = torch.randn(2, 1, 1, 3, 16, 16)
        given["aspect_ratio_ids"] = torch.ones(2, 1, dtype=torch.long)
        given["aspect_ratio_mask"] = torch.ones(2, 1, 1, dtype=torch.long)
        given["cross_attention_mask"] = torch.ones(2, numbers.shape[1], 1, 1, dtype=torch.long)
    elif name == "siglip2":
        given["pixel_values"] = torch.randn(2, 16, 48)
        given["pixel_attention_mask"] = torch.ones(2, 16, dtype=torch.long)
        given["spatial_shapes"] = patches
    elif name == "florence2":
        given["decoder_input_ids"] = ids(2, 7)
    return given


def told(result):
    """All attention weights in a result, those of its parts too."""
    for key, value in result.items():
        if key.endswith("attentions"):
            yield from (layer for layer in value or () if layer is not None)
        elif hasattr(value, "items"):
            yield from told(value)


def counting(tensor, mask):
    """Of (B, L, ...) and (B, H, L, S) the rows that are no padding; of others all."""
    if tensor.shape[0] == len(mask) and tensor.ndim == 4 and tensor.shape[2] == mask.shape[1]:
        tensor = tensor.transpose(1, 2)
    if tensor.shape[:2] == mask.shape:
        tensor = tensor[mask]
    return tensor.detach().flatten()


class TrueDouble(TorchFunctionMode):
    """As `true_double` of test_hf_families.py does, and watch still knows the softmax."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.softmax:
            return softmax_in_full(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def run(model, given):
    """Output, gradients of all parameters, all weights that the model returns, and all that watch
    sees by the names of their layers; each as one vector."""
    dtype = next(model.parameters()).dtype
    given = {k: t.to(dtype) if t.is_floating_point() else t for k, t in given.items()}
    mask = given["attention_mask"].bool()
    with TrueDouble(), clearhead.watch(model, aux=AuxRequest(weights=True)) as seen:
        result = model(**given, output_attentions=True)
    assert seen.unseen == [] and seen.passed_over == []
    if "logits_per_text" in result:
        out = torch.cat([result[k] for k in ("logits_per_text", "text_embeds", "image_embeds")], 1)
    else:
        out = result.logits
    chosen = out[mask] if out.shape[:2] == mask.shape else out
    torch.manual_seed(3)
    (chosen * torch.randn(chosen.shape)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    weights = [counting(layer, mask) for layer in told(result)]
    watched = {record.layer: counting(record.aux.weights, mask) for record in seen}
    return chosen.detach(), torch.cat(gradients), torch.cat(weights), watched, seen


@pytest.mark.parametrize("name", [*WRITERS, *PAIRS])
def test_a_model_of_two_halves_equals_its_eager_attention(name, registered):  # noqa: F811
    given, peer = inputs(name), build(name, "eager")
    ours, gold = build(name, "clearhead", peer.state_dict()), copy.deepcopy(peer).double()
    mine = run(ours, given)
    calls = len(registered)
    theirs, true = run(peer, given), run(gold, given)
    assert len(registered) == calls  # eager is eager
    # Each softmax of the eager model is a call of clearhead; torch's own modules stay what they
    # are (SigLIP gathers its picture in one).
    torchs = [r for r in theirs[4] if r.kind == "multi_head_attention_forward"]
    assert calls == len(theirs[4]) - len(torchs) >= 4
    assert mine[3].keys() == theirs[3].keys() and len(torchs) == name.startswith("siglip")
    for kind, a, b, c in zip(("out", "gradient", "weights"), mine, theirs, true, strict=False):
        assert (b - c).abs().max() < 1e-4 * max(1.0, c.abs().max())
        budget = "gradient by torch" if kind == "gradient" else "gradient"
        assert_within_budget(a, c, b, budget, name=f"{name}: {kind}")
    a, b, c = (torch.cat(list(weights[3].values())) for weights in (mine, theirs, true))
    assert_within_budget(a, c, b, "gradient", name=f"{name}: weights that watch saw")


@pytest.mark.parametrize("name", WRITERS)
def test_greedy_tokens_are_eager_s(name):
    given = {k: t for k, t in inputs(name).items() if k != "decoder_input_ids"}
    peer = build(name, "eager")
    ours = build(name, "clearhead", peer.state_dict())
    choose = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    tokens = ours.generate(**given, **choose)
    assert torch.equal(tokens, peer.generate(**given, **choose))


# ---- what cannot be served ----


def test_blip_s_attention_is_its_own():
    config = AutoConfig.for_model("blip", text_config=TEXT, vision_config=VISION)
    with pytest.raises(
        NotImplementedError, match="^Blip\\w+ computes attention in code of its own"
    ):
        AutoModel.from_config(config, attn_implementation="clearhead")


def test_a_half_that_cannot_be_served_is_named():
    text = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=48)
    config = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**VISION))
    with pytest.raises(NotImplementedError, match="^BloomModel computes attention in code of its"):
        LlavaForConditionalGeneration._from_config(config, attn_implementation="clearhead")
    model = build("llava", "eager")
    model.model.language_model = AutoModel.from_config(text, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match="^BloomModel computes attention in code of its"):
        hf.use(model)
