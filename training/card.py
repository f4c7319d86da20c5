"""The model card of the shipped pair, with the loss curves as a picture and as JSON lines.

What it does: writes them from the measurement and the training logs, and copies the curves in
compact form into this folder. Every figure in the card is read from those files, but for the section on the
head, which is copied from `head.md`.
What it does not do: measure anything itself.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from training import corpus
from training.model import DRAFT, TARGET, Shape

CURVES = Path(__file__).with_name("curves.jsonl")
TEMPLATE = Path(__file__).with_name("card.md")
HEAD = Path(__file__).with_name("head.md")
Record = dict[str, Any]


def read_records(file: Path) -> list[Record]:
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def collect_curves(scratch: Path) -> list[Record]:
    """Joins the logs of both phases, each record marked with its phase."""
    records = []
    for phase in ("train", "distill"):
        records += [{"phase": phase, **record} for record in read_records(scratch / f"{phase}.jsonl")]
    return records


def series(records: list[Record], phase: str, kind: str, name: str) -> tuple[list[float], list[float]]:
    """Picks one curve: minutes and values."""
    picked = [r for r in records if r["phase"] == phase and r["kind"] == kind and name in r]
    return [r["minutes"] for r in picked], [r[name] for r in picked]


def draw(records: list[Record], file: Path) -> None:
    """Draws losses, acceptance and multiplication rates over the minutes of each phase."""
    figure = Figure(figsize=(12, 3.6), dpi=90)
    left, middle, right = figure.subplots(1, 3)
    left.plot(*series(records, "train", "train", "loss"), linewidth=0.6, label="target, training (weighted)")
    for name, label in (("heldout_target", "target, held out"), ("heldout_draft", "draft, held out")):
        left.plot(*series(records, "train", "heldout", name), marker=".", label=label)
    left.set(xlabel="minutes", ylabel="nats per token", ylim=(1, 7), title="Loss")
    begin = max(series(records, "train", "heldout", "heldout_acceptance")[0])
    middle.plot(*series(records, "train", "heldout", "heldout_acceptance"), marker=".", label="beside the target")
    minutes, values = series(records, "distill", "heldout", "heldout_acceptance")
    middle.plot([begin + m for m in minutes], values, marker=".", label="last distillation")
    middle.set(xlabel="minutes", title="Chance that a drafted token is accepted\n(held-out text, temperature 0.8)")
    for name in ("seen", "unseen"):
        right.plot(*series(records, "train", "heldout", name), marker=".", label=f"{name} (sample)")
    right.set(xlabel="minutes", ylim=(0, 1), title="Two-digit products, greedy")
    for axes in (left, middle, right):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)


def describe(shape: Shape, parameters: int) -> str:
    """Writes one row of the table of architectures."""
    head = "tied to the embedding" if shape.tied else "its own"
    return (
        f"{parameters / 1e6:.2f} M | {shape.hidden} | {shape.layers} | {shape.heads} of {shape.head_dim} "
        f"| {shape.kv_heads} | {shape.intermediate} | {head}"
    )


def speculation_table(measured: Record) -> str:
    """Writes the rows of tokens per round and acceptance by temperature."""
    rows = []
    for temperature, values in measured["speculation"].items():
        error = values["standard_error_over_prompts"]
        rate = 100 * values["acceptance_rate"]
        rows.append(
            f"| {temperature} | {rate:.1f} % | {values['tokens_per_round']:.2f} | {error:.2f} | {values['rounds']} |"
        )
    return "\n".join(rows)


def write_card(measured: Record, records: list[Record], notes: str, file: Path) -> None:
    """Fills the template of the card."""
    steps = {p: max(r.get("step", 0) for r in records if r["phase"] == p) for p in ("train", "distill")}
    minutes = {p: max(r.get("minutes", 0) for r in records if r["phase"] == p) for p in ("train", "distill")}
    own = max(r.get("rows", 0) for r in records if r["phase"] == "distill")
    held, seen = corpus.heldout_sources(), corpus.training_sources()
    rates, text = measured["multiplication"], measured["heldout_text"]
    card = TEMPLATE.read_text(encoding="utf-8").format(
        notes=notes,
        python=platform.python_version(),
        tiny=describe(TARGET, measured["parameters"]["tiny"]),
        draft=describe(DRAFT, measured["parameters"]["tiny-draft"]),
        training_sources=len(seen),
        training_characters=f"{sum(len(s.text) for s in seen) / 1e6:.2f}",
        heldout_sources=len(held),
        heldout_characters=f"{sum(len(s.text) for s in held) / 1e6:.2f}",
        seen_products=len(corpus.product_pairs(heldout=False)),
        unseen_products=len(corpus.product_pairs(heldout=True)),
        train_steps=steps["train"],
        train_minutes=round(minutes["train"]),
        distill_steps=steps["distill"],
        distill_minutes=round(minutes["distill"]),
        own_rows=own,
        speculation=speculation_table(measured),
        heldout_target=f"{text['heldout_target']:.2f}",
        heldout_draft=f"{text['heldout_draft']:.2f}",
        heldout_acceptance=f"{text['heldout_acceptance']:.2f}",
        questions=rates["questions_each"],
        unseen=f"{100 * rates['unseen']:.1f}",
        seen=f"{100 * rates['seen']:.1f}",
    )
    file.write_text(card + HEAD.read_text(encoding="utf-8"), encoding="utf-8")


def main() -> None:
    """Writes card, picture and curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--result", type=Path, required=True, help="JSON file of the measurement")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shipped pair")
    parser.add_argument("--notes", type=Path, help="list items on what was particular to the run")
    options = parser.parse_args()
    records = collect_curves(options.scratch)
    CURVES.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    draw(records, options.out / "loss.png")
    notes = options.notes.read_text(encoding="utf-8") if options.notes else ""
    measured = json.loads(options.result.read_text(encoding="utf-8"))
    write_card(measured, records, notes, options.out / "README.md")


if __name__ == "__main__":
    main()
