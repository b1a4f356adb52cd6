"""What `clearhead see` found, printed: sentences and tables from the plain dict of sight.py."""

from typing import Any

import typer

from clearhead.inspection.report import Report
from clearhead.inspection.roles import RoleTable
from clearhead.view.heads import show_effects, show_leaders, show_roles
from clearhead.view.heatmap import show_head
from clearhead.view.links import show_links, show_map, show_outstanding
from clearhead.view.terminal import make_console, print_wrapped


def tell_written(
    seen: dict[str, Any], report: Report, html: str | None, png: str | None, table: RoleTable | None
) -> None:
    """Write the page and the picture that were asked for, and say what was written."""
    console = make_console()
    summary = _summary(seen)
    print_wrapped(console, summary, indent=0)
    head = None if seen["layer"] is None else (seen["layer"], seen["head"])
    roles = [] if table is None else table.summary()
    badges = [] if table is None else table.badges()
    first = [(leader["layer"], leader["head"]) for leader in seen["leaders"]]
    for line in report.write(seen["model"], summary, html, png, head, roles, badges, first):
        typer.echo(line)  # never wrapped: a path is to be copied


def show(seen: dict[str, Any], only_roles: bool) -> None:
    """Print what `see` found."""
    console = make_console()
    rows = [] if seen["roles"] is None else seen["roles"]["rows"]
    if only_roles:
        print_wrapped(console, seen["model"], indent=0)
        console.print()
        show_roles(console, rows, layers=_depth(seen))
        console.print()
        show_effects(console, rows)
        return
    print_wrapped(console, _summary(seen), indent=0)
    console.print()
    if len(seen["tokens"]) == 1:
        print_wrapped(console, "A text of one token has nothing to look at but itself.", indent=0)
        return
    depth, words, hidden = len(seen["heads"]), seen["words"], " and ".join(seen["hidden"])
    known = seen["roles"] is not None
    if known and seen["layer"] is None:
        of_role = {row["role"]: row for row in rows}
        leaders = [
            (
                of_role[leader["role"]],
                [(link["source"], _link(link | leader)) for link in leader["links"]],
                leader["sink"],
            )
            for leader in seen["leaders"]
        ]
        show_leaders(console, words, leaders, layers=depth)
        console.print()
    if seen["picture"] is not None:
        kept = seen["hidden_tokens"] if seen["sink_hidden"] else []
        title = f"Head {seen['head']} of layer {seen['layer']}"
        show_head(console, seen["pieces"], seen["picture"], title=title, hidden=kept)
        mass = [sum(row[j] for j in seen["hidden_tokens"]) for row in seen["picture"]]
        share = sum(mass[1:]) / max(1, len(mass) - 1)
        told = "is left out" if kept else "is shown"
        text = f"Its weight on {hidden} {told}: {share:.2f} on average over the other rows."
        print_wrapped(console, text, style="dim", indent=0)
        console.print()
    show_links(
        console,
        words,
        [[_link(link) for link in row] for row in seen["links"]],
        layers=depth,
        causal=seen["causal"],
        hidden=hidden,
        meanings=[[link["is"] for link in row] for row in seen["links"]] if known else None,
        left_out=_left_out(seen, hidden),
    )
    console.print()
    show_outstanding(
        console,
        words,
        [(link["source"], _link(link)) for link in seen["outstanding"]],
        layers=depth,
        meanings=[link["is"] for link in seen["outstanding"]],
    )
    if known and seen["layer"] is None:
        console.print()
        show_roles(console, rows, layers=depth)
    if seen["head"] is None:
        console.print()
        show_map(console, seen["map"]["values"], seen["map"]["stat"], hidden)


def _summary(seen: dict[str, Any]) -> str:
    sizes, L = seen["heads"], len(seen["tokens"])
    heads = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    name = seen["model"] + (" (its encoder)" if seen["encoder"] else "")
    by = "clearhead" if seen["attention"] == "clearhead" else "the model's own code"
    text = f"{name}: {len(sizes)} layers x {heads} heads, {L} token{'s' * (L != 1)}"
    text += f"; attention by {by}"
    if seen["layer"] is not None:
        text += f"; links of layer {seen['layer']}"
        text += "" if seen["head"] is None else f", head {seen['head']}"
    return text


def _left_out(seen: dict[str, Any], hidden: str) -> str:
    if not seen["sink_hidden"]:
        return "itself"
    share = f", which takes {seen['sink']:.2f} of all attention" if seen["sink"] else ""
    if " and " in hidden:
        share = share.replace("which takes", "which take")
    return f"itself, {hidden}{share}"


def _link(link: dict[str, Any]) -> tuple[int, float, int, int]:
    return link["target"], link["weight"], link["layer"], link["head"]


def _depth(seen: dict[str, Any]) -> int:
    scores = seen["roles"]["scores"].values()
    return max((len(layers) for layers in scores), default=1)
