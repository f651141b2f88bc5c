"""`narrowgauge plan`: what fits on N GPUs of so much memory, by recipe and layout, before there are any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.cli.arguments import Parser

if TYPE_CHECKING:
    from argparse import Namespace

    from narrowgauge.observe.plan_search import Answer, Work

DEFAULT_RECIPES = ("bf16", "fp8_lm_o2", "narrow8")
PICTURED = 8  # numbers of GPUs: those asked for, and halves of them


def plan(argv: Sequence[str]) -> int:
    """Print bytes by role for each recipe, whether they fit, and write a picture where one is asked for."""
    arguments = _parser().parse(argv)

    from narrowgauge.cli.console import print_json
    from narrowgauge.observe.plan_search import Work, check_family, largest
    from narrowgauge.recipes.library import recipe

    among_many = arguments.largest or arguments.picture
    for name in arguments.recipe:
        (check_family if among_many else recipe)(name)  # a wrong one is found before anything is computed
    work = Work(arguments.batch_size, arguments.sequence_length, arguments.accumulation, arguments.checkpointing)
    answers = [_answer(arguments, name, work) for name in arguments.recipe]
    fits: dict[str, Any] = {}
    if arguments.largest:
        fits = {name: largest(name, arguments.gpus, arguments.memory_gb, work) for name in arguments.recipe}
    pictured = _draw(arguments, work) if arguments.picture else None
    if arguments.json:
        print_json(_as_json(arguments, answers, fits, pictured))
        return 0
    _print_answers(arguments, answers)
    _print_largest(arguments, fits)
    if arguments.picture:
        print(f"wrote {arguments.picture}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "What a training step takes on each GPU, by role, and what it sends: the best layout of --gpus GPUs for each\n"
        "recipe, or the one given by --parallel. keys. Nothing is allocated, and no GPU is needed.",
        [
            "narrowgauge plan --model gpt-175b --gpus 1024 --memory-gb 80",
            "narrowgauge plan --model llama3-8b --gpus 8 --memory-gb 80 --recipe narrow8 --largest",
            "narrowgauge plan --model gpt-13b --gpus 16 --memory-gb 40 --parallel.shard 8 --parallel.data 2",
            "narrowgauge plan --model gpt-175b --gpus 1024 --memory-gb 80 --picture largest.svg",
        ],
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="a preset: gpt-125m to gpt-175b, llama3-8b, ...")
    parser.add_argument("--gpus", required=True, type=int, help="how many there are")
    parser.add_argument("--memory-gb", required=True, type=float, help="of each; 1 GB = 10^9 bytes")
    parser.add_argument(
        "--recipe",
        nargs="+",
        default=list(DEFAULT_RECIPES),
        help=f"names, or files as `tune` writes them; default: {', '.join(DEFAULT_RECIPES)}",
    )
    parser.add_argument("--batch_size", type=int, default=1, help="sequences of a micro-batch on a rank; default 1")
    parser.add_argument("--sequence_length", type=int, help="tokens; default: the model's context")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step; default 1")
    parser.add_argument("--checkpointing", default="auto", help="none, full, or auto (default): none where that fits")
    for name in ("data", "shard", "tensor", "pipeline"):
        parser.add_argument(f"--parallel.{name}", type=int, help="ranks; without any --parallel. key: the best layout")
    parser.add_argument("--largest", action="store_true", help="also the largest preset, and GPT, that fits")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the largest model by recipe and number of GPUs")
    parser.add_json_option()
    return parser


def _answer(arguments: Namespace, recipe: str, work: Work) -> Answer:
    """The layout that was asked for, or the best."""
    from narrowgauge.observe.plan_layout import DIMENSIONS, Spread
    from narrowgauge.observe.plan_search import best, given

    sizes = {name: vars(arguments)[f"parallel.{name}"] for name in DIMENSIONS}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if not sizes:
        return best(arguments.model, recipe, arguments.gpus, arguments.memory_gb, work)
    return given(arguments.model, recipe, Spread(**sizes), arguments.gpus, arguments.memory_gb, work)


def _verdict(answer: Answer) -> str:
    plan = answer.plan
    missing = plan.missing(answer.memory_bytes)
    if missing <= 0:
        return f"fits, {_gb(-missing)} to spare"
    return f"does not fit: {_gb(missing)} too much"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _print_answers(arguments: Namespace, answers: Sequence[Answer]) -> None:
    from narrowgauge.cli.console import print_table
    from narrowgauge.observe.planner import ROLES

    first = answers[0].plan
    title = (
        f"{arguments.model}, {first.parameters / 1e9:,.2f}B parameters, on {arguments.gpus:,} GPUs of "
        f"{arguments.memory_gb:g} GB: GB on the one that needs the most"
    )
    names = [answer.plan.recipe for answer in answers]
    rows: list[list[Any]] = [
        [role, *(f"{answer.plan.bytes.get(role, 0) / 1e9:.3f}" for answer in answers)]
        for role in ROLES
        if any(answer.plan.bytes.get(role) for answer in answers)
    ]
    rows.append(["peak", *(f"{answer.plan.peak / 1e9:.3f}" for answer in answers)])
    wires = dict.fromkeys(role for answer in answers for role in answer.plan.wire)
    rows += [[f"sent: {role}", *(f"{a.plan.wire.get(role, 0) / 1e9:.3f}" for a in answers)] for role in wires]
    print_table(title, ["", *names], rows)
    details = [
        [a.plan.recipe, _verdict(a), str(a.plan.spread), a.plan.checkpointing, f"{a.plan.tokens:,}"] for a in answers
    ]
    print_table("", ["recipe", "", "layout", "checkpointing", "tokens a step"], details)
    for answer in answers:
        if answer.plan.own_casts is not None:
            own, layers = answer.plan.own_casts
            rest = "" if own == layers else "; the others multiply as it says for all"
            print(f"{answer.plan.recipe}: casts of their own for {own:,} of {layers:,} linear layers{rest}")


def _print_largest(arguments: Namespace, fits: dict[str, Any]) -> None:
    if not fits:
        return
    from narrowgauge.cli.console import print_table
    from narrowgauge.observe.plan_layout import outline
    from narrowgauge.observe.plan_picture import billions

    rows = [
        [name, preset or "none", "none" if member is None else
         f"{billions(outline(member).parameters)}: {member.layers} blocks, width {member.width:,}"]
        for name, (preset, member) in fits.items()
    ]  # fmt: skip
    title = f"largest that fits on {arguments.gpus:,} GPUs of {arguments.memory_gb:g} GB"
    print_table(title, ["recipe", "preset", "GPT of this family"], rows)


def _draw(arguments: Namespace, work: Work) -> dict[str, dict[int, int]]:
    """Write the picture: parameters of the largest GPT by recipe and number of GPUs."""
    from narrowgauge.observe.plan_layout import outline
    from narrowgauge.observe.plan_picture import picture
    from narrowgauge.observe.plan_search import check_budget, check_family, family, largest_of_family

    budget = check_budget(arguments.gpus, arguments.memory_gb)
    gpus = [arguments.gpus >> n for n in range(PICTURED) if arguments.gpus >> n]
    found: dict[str, dict[int, int]] = {}
    for name in arguments.recipe:
        resolved = check_family(name)
        blocks = {count: largest_of_family(resolved, count, budget, work) for count in gpus}
        found[name] = {count: outline(family(n)).parameters if n else 0 for count, n in blocks.items()}
    tokens = work.sequence_length or family(1).context
    title = f"Largest GPT that fits a cluster of {arguments.memory_gb:g} GB GPUs, by recipe"
    note = (
        f"{work.batch_size} x {tokens:,} tokens a rank, accumulation {work.accumulation}, checkpointing "
        f"{work.checkpointing}, the best layout of data, shard, tensor and pipeline for each"
    )
    with open(arguments.picture, "w", encoding="utf-8") as file:
        file.write(picture(found, title, note))
    return found


def _as_json(arguments: Namespace, answers: Sequence[Answer], fits: dict[str, Any], pictured: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "gpus": arguments.gpus,
        "memory_bytes": answers[0].memory_bytes,
        "plans": [{**a.plan.to_dict(), "fits": a.fits, "missing": a.plan.missing(a.memory_bytes)} for a in answers],
    }
    if fits:
        result["largest"] = {
            name: {"preset": preset, "family": None if member is None else dataclasses.asdict(member)}
            for name, (preset, member) in fits.items()
        }
    if pictured is not None:
        result["pictured"] = pictured
    return result
