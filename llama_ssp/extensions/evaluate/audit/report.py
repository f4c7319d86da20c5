"""The report of an audit: one page to attach to an issue, `audit.md`, and JUnit XML for CI, `audit.xml`."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from llama_ssp.extensions.evaluate.audit.asking import Gathered
from llama_ssp.extensions.evaluate.audit.checks import FAILED, HELD, NOTED, UNKNOWN, Finding, SeenContext
from llama_ssp.extensions.evaluate.audit.records import settings_of
from llama_ssp.reports.provenance import versions
from llama_ssp.run.session import Session
from llama_ssp.text.detokenize import decode_after
from llama_ssp.text.messages import visible

_MOST_BEFORE = 60
_MEANING = """\
Texts of the server were scored with the target's own weights. For a score f of the next token, the sum of f(token)
minus its mean under the target is 0 on average if the texts are the target's, whatever was drawn before; `law`, `first
tokens` and `end of the context` compare such sums, named after the fault that moves them most, with their standard
errors. A setting is judged by likelihood ratios of the law with it and the law without it; exp(12) and more decide. A
correct server fails with probability 0.001 at most.
"""


def write_report(
    session: Session, found: Gathered, findings: Sequence[Finding], outcome: str, contexts: Sequence[SeenContext]
) -> None:
    """Write both files into the run folder, on rank 0."""
    assert session.folder
    session.folder.write_kept("audit.md", _page(session, found, findings, outcome, contexts))
    num = Counter(one.outcome for one in findings)
    suite = Xml.Element(
        "testsuite",
        name="llama-ssp audit",
        tests=f"{len(findings)}",
        failures=f"{num[FAILED]}",
        skipped=f"{num[UNKNOWN]}",
        errors="0",
    )
    for one in findings:
        case = Xml.SubElement(suite, "testcase", classname="audit", name=one.check)
        if one.outcome not in {HELD, NOTED}:
            kind = "failure" if one.outcome == FAILED else "skipped"
            Xml.SubElement(case, kind, message=visible(one.said))
        else:
            Xml.SubElement(case, "system-out").text = visible(one.said)  # given to an element nowhere else
    session.folder.write_kept("audit.xml", Xml.tostring(suite, encoding="unicode") + "\n")


def _page(
    session: Session, found: Gathered, findings: Sequence[Finding], outcome: str, contexts: Sequence[SeenContext]
) -> str:
    config, task, words = session.config, settings_of(session.config), sys.argv[1:]
    command = shlex.join(["llama-ssp", *(["run"] if "=" in "".join(words[:1]) else []), *words])
    known = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    failed = ", ".join(one.check for one in findings if one.outcome == outcome == FAILED)
    lines = [
        f"# Audit of {task.url}: {outcome}{failed and f' ({failed})'}",
        "",
        f"    {command}",
        "",
        f"- The server says that it is: {visible(found.served)}. Add its version and its own command line.",
        f"- Read with {known}.",
        f"- {len(found.answers)} of {len(found.prompts)} answers, {found.num_repeated} requests repeated.",
        f"- Temperature {config.sampling.temperature:g}, K = {config.most_draft_tokens}, seed {config.seed}.",
        "",
        "| check | outcome | |",
        "|---|---|---|",
        *(f"| {one.check} | {one.outcome} | {_cell(one.said)} |" for one in findings),
        "",
        _MEANING,
    ]
    if contexts:
        lines += [
            "The contexts that speak most against the law, of those that came at least 20 times:",
            "",
            "| text before | next | came | expected | texts |",
            "|---|---|---|---|---|",
        ]
    for one in contexts:
        before = decode_after(session.models.tokenizer, (), one.before)[-_MOST_BEFORE:]
        texts = before, decode_after(session.models.tokenizer, one.before, [one.token])
        cells = " | ".join(f"`{_cell(repr(text))}`" for text in texts)
        lines.append(f"| {cells} | {one.num_came} | {one.num_expected:.1f} | {one.num_texts} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("\n", " ")
