"""What it costs to watch: an idle watch, and every head's statistics beside other ways to them.

    python benchmarks/watch.py idle      a 135M decoder at one token, watched by nobody
    python benchmarks/watch.py stats     12 layers x 12 heads, D = 64, at 1024 tokens and 2048

Ways are run in turn, and a figure is the median of the ratios to the plain forward beside it. Needs
transformers; all weights are random.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import clearhead
from clearhead import AuxRequest


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    plain: Callable[[], object], ways: dict[str, Callable[[], object]], rounds: int
) -> None:
    """Print each way's time as a multiple of plain's."""
    for run in (plain, *ways.values()):
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    base = []
    for _ in range(rounds):
        for name, run in ways.items():
            before = timed(plain)
            times[name].append(timed(run) / before)
            base.append(before)
    print(f"  {'plain':<44} {statistics.median(base) * 1e3:9.1f} ms")
    for name, ratios in times.items():
        print(f"  {name:<44} {statistics.median(ratios):9.3f} x")


def idle(rounds: int) -> None:
    config = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, vocab_size=49152,
    )  # fmt: skip
    model = LlamaModel(config).eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)

    def forward() -> None:
        model(tokens, use_cache=False)

    def under(**options: object) -> Callable[[], None]:
        def run() -> None:
            forward()

        def enter() -> None:
            watch = clearhead.watch(model, **options)  # type: ignore[arg-type]
            watch.__enter__()
            forward()  # the first forward, in which the layers are found
            held.append(watch)

        def leave() -> None:
            held.pop().__exit__(None, None, None)

        held: list = []
        run.enter, run.leave = enter, leave  # type: ignore[attr-defined]
        return run

    print(f"idle watch: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M, L = 1")
    cases = {"every=1000000": {"every": 1000000}, "layers=[99]": {"layers": [99]},
             "recording all": {}, "recording layer 7": {"layers": [7]}}  # fmt: skip
    for _ in range(5):
        forward()
    for name, options in cases.items():
        run, ratios = under(**options), []
        for _ in range(rounds):
            before = statistics.median(timed(forward) for _ in range(5))
            run.enter()  # type: ignore[attr-defined]
            ratios.append(statistics.median(timed(run) for _ in range(5)) / before)
            run.leave()  # type: ignore[attr-defined]
        print(f"  {name:<44} {statistics.median(ratios):9.3f} x of {before * 1e3:.1f} ms")


def gpt2(L: int, implementation: str) -> GPT2Model:
    torch.manual_seed(0)
    config = GPT2Config(n_positions=L, n_layer=12, n_head=12, n_embd=768, vocab_size=1000,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2Model._from_config(config, attn_implementation=implementation).eval()


def stats(L: int, rounds: int, memory: str | None) -> None:
    tokens = torch.arange(L)[None] % 1000
    fused = gpt2(L, "sdpa")

    def plain() -> None:
        fused(tokens, use_cache=False)

    def default() -> None:
        with clearhead.watch(fused):
            plain()

    def cheap() -> None:
        with clearhead.watch(fused, aux=AuxRequest(lse=True, max_logit=True, reduce="head")):
            plain()

    ways = {"watch, its default statistics": default, "watch, lse and max_logit": cheap}
    if memory != "watch":
        eager = gpt2(L, "eager")

        def returned() -> None:
            summarise(eager(tokens, use_cache=False, output_attentions=True).attentions)

        def hooked() -> None:
            found: list = []
            handles = [
                block.attn.register_forward_hook(lambda _, __, out: found.append(summary(out[1])))
                for block in eager.h
            ]
            eager(tokens, use_cache=False)
            for handle in handles:
                handle.remove()

        ways |= {"eager, output_attentions": returned, "eager, summed up in hooks": hooked}
    if memory is not None:
        run = {"plain": plain, "watch": default, "eager": ways.get("eager, output_attentions"),
               "hooks": ways.get("eager, summed up in hooks")}[memory]  # fmt: skip
        plain()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert run is not None
        run()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"  peak memory beyond a plain forward, {memory}: {(after - before) / 1024:.0f} MB")
        return
    print(f"statistics of 12 layers x 12 heads, D = 64, L = {L}, float32")
    compare(plain, ways, rounds)


def summary(weights: torch.Tensor) -> list[torch.Tensor]:
    """The default statistics but max_logit, as one writes them by hand."""
    L = weights.shape[-1]
    own = torch.arange(L)
    distance = (own[:, None] - own).abs().to(weights.dtype)
    return [
        torch.special.entr(weights).sum(-1).mean(-1),
        weights[..., 0].mean(-1),
        weights.diagonal(0, -2, -1).mean(-1),
        weights.diagonal(-1, -2, -1).mean(-1),
        (weights * distance).sum(-1).mean(-1),
    ]


def summarise(attentions: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
    return [summary(weights) for weights in attentions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("idle", "stats"))
    parser.add_argument("--length", type=int, default=0, help="1024 and 2048 where left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=("plain", "watch", "eager", "hooks"))
    options = parser.parse_args()
    with torch.inference_mode():
        if options.what == "idle":
            idle(options.rounds)
        else:
            for L in [options.length] if options.length else [1024, 2048]:
                stats(L, options.rounds, options.memory)


if __name__ == "__main__":
    sys.exit(main())
