"""The report of an audit: one page to attach to an issue, `audit.md`, and JUnit XML for CI, `audit.xml`."""

import shlex
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from llama_ssp.continuation import decode_after
from llama_ssp.reports.provenance import versions
from llama_ssp.rooms.evaluate.audit.asking import Gathered
from llama_ssp.rooms.evaluate.audit.checks import FAILED, HELD, NOTED, Finding, SeenContext
from llama_ssp.rooms.evaluate.audit.records import settings_of
from llama_ssp.run.session import Session
from llama_ssp.words import visible

_MOST_BEFORE = 60


def write_report(
    session: Session, found: Gathered, findings: Sequence[Finding], outcome: str, contexts: Sequence[SeenContext]
) -> None:
    """Write both files into the run folder, on rank 0."""
    assert session.folder
    session.folder.write_kept("audit.md", _page(session, found, findings, outcome, contexts))
    suite = Xml.Element("testsuite", name="llama-ssp audit", tests=str(len(findings)))
    for one in findings:
        case = Xml.SubElement(suite, "testcase", classname="audit", name=one.check)
        if one.outcome not in {HELD, NOTED}:
            kind = "failure" if one.outcome == FAILED else "skipped"
            Xml.SubElement(case, kind, message=visible(one.said))
        else:
            Xml.SubElement(case, "system-out").text = visible(one.said)
    session.folder.write_kept("audit.xml", Xml.tostring(suite, encoding="unicode") + "\n")


def _page(
    session: Session, found: Gathered, findings: Sequence[Finding], outcome: str, contexts: Sequence[SeenContext]
) -> str:
    config, task = session.config, settings_of(session.config)
    draft = config.draft.model.name if config.draft.model else config.draft.kind
    words = [
        "llama-ssp", "audit", str(task.url), f"model={config.model.name}", f"draft={draft}", f"seed={config.seed}",
        f"max_new_tokens={config.max_new_tokens}", f"task.tokens={task.tokens}",
        *([f"baseline={task.baseline}"] if task.baseline else []),
    ]  # fmt: skip
    known = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    asked = f"{len(found.answers)} of {len(found.prompts)} answers, {found.num_repeated} requests repeated."
    lines = [
        f"# Audit of {task.url}: {outcome}", "", f"    {shlex.join(words)}", "", f"Read with {known}; {asked}", "",
        "| check | outcome | |", "|---|---|---|",
        *(f"| {one.check} | {one.outcome} | {_cell(one.said)} |" for one in findings), "",
        "The contexts that speak most against the law, of those that came at least 20 times:", "",
        "| text before | next | came | expected | texts |", "|---|---|---|---|---|",
    ]  # fmt: skip
    tokenizer = session.models.tokenizer
    for one in contexts:
        before = decode_after(tokenizer, (), one.before)[-_MOST_BEFORE:]
        token = decode_after(tokenizer, one.before, [one.token])
        cells = (f"`{_cell(repr(text))}`" for text in (before, token))
        lines.append(f"| {' | '.join(cells)} | {one.num_came} | {one.num_expected:.1f} | {one.num_texts} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("\n", " ")
