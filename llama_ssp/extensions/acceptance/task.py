"""`task=acceptance`: samples texts or takes finished ones, reads them with target and drafts, and writes their trace.

Batches of texts are read in an order that does not depend on what was read before an interruption. Each batch becomes
a part in the run folder, and the parts together become the trace.
"""

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from llama_ssp.errors import FULL_DISK, CapacityError, ConfigError, InterruptedRun, SspError
from llama_ssp.extensions.acceptance.reading import Found, Reader
from llama_ssp.extensions.acceptance.records import (
    TRACE_FILE,
    AcceptanceConfig,
    drafts_of,
    in_rounds,
    stored_file,
    temperatures_of,
    trees_of,
)
from llama_ssp.extensions.acceptance.rows import NUM_SIMULATED, rows_of
from llama_ssp.extensions.acceptance.simulation import auto_seconds
from llama_ssp.extensions.acceptance.texts import FinishedText, read_texts
from llama_ssp.extensions.acceptance.trace import PROPOSED, VERSION, Trace, law_of
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import PlanSpec, make_spec
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.failures import from_rank_0, raise_on_all_ranks
from llama_ssp.registry import imported
from llama_ssp.run.checkpoints import Source, find_sources, with_number_formats
from llama_ssp.run.decoders import Models, build_decoder, with_draft
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.settings.drafters import is_certain
from llama_ssp.settings.lengths import finder
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from llama_ssp.text.detokenize import TextAfter
from llama_ssp.weights.hashes import fingerprint

PARTS = "parts"
_MOST_APART, _MOST_IMPOSSIBLE = 6.0, 0.01
"""Standard deviations from the mean log-probability, and the share of tokens that the target never writes, from which
texts are refused. Rounding moves one of some 100,000 tokens out of the set that top-k, top-p and min-p keep."""


def acceptance(session: Session, requests: list[PromptRequest]) -> None:
    """Do the task; raises InterruptedRun on every rank if stopped, and ConfigError for texts of another target."""
    config, task = session.config, cast("AcceptanceConfig", session.config.task)
    texts = _given(session) if task.texts else _sampled(session, requests)
    configs = _configs(config)
    if session.plan:
        _require_room(session, configs)
    drafts, sources = _loaded(session, configs)
    about = {
        "version": VERSION,
        "texts": _digest(texts),
        "longest": task.longest,
        "laws": [law_of(one.sampling) for one in configs],
        "target": {"name": config.model.name, "files": fingerprint(session.models.sources[0].origin.folder)},
        "drafts": {
            name: {
                "files": fingerprint(source.origin.folder) if source else {},
                "is_certain": is_certain(drafts[name][1]),
                "width": 0,
            }
            for name, source in sources.items()
        },
    }
    _read(session, configs, drafts, texts, about)
    with raise_on_all_ranks(session.world.comm):
        if session.folder:
            _answer(session, configs, sources)


def _configs(config: RunConfig) -> list[RunConfig]:
    """The run's settings at each of its laws."""
    return [
        replace(config, sampling=replace(config.sampling, temperature=temperature))
        for temperature in temperatures_of(config)
    ]


def _given(session: Session) -> list[FinishedText]:
    """Return the texts that the user names, the same on every rank."""
    task, models = cast("AcceptanceConfig", session.config.task), session.models
    read = partial(
        read_texts,
        session.config,
        str(task.texts),
        models.tokenizer,
        vocab_size=models.target.vocab_size,
        context=models.context,
    )
    records = from_rank_0(session.world.comm, lambda: [asdict(text) for text in read()])
    return [_of_record(record) for record in records]


def _of_record(record: Mapping[str, Any]) -> FinishedText:
    ids = {name: tuple(record[name]) for name in ("prompt_ids", "token_ids")}
    return FinishedText(**(dict(record) | ids))


def _sampled(session: Session, requests: list[PromptRequest]) -> list[FinishedText]:
    """Complete all requests, a share of them at each temperature; the same texts on every rank."""
    config, mode = session.config, session.best_mode
    configs = _configs(config)
    with session.showing_progress(requests, [mode], shows_texts=False):
        for law, of_law in enumerate(configs):
            session.decoders[mode] = build_decoder(
                session.models, of_law, speculative=session.models.drafts, stop_request=session.stop_request
            )
            own = [request for request in requests if request.sample % len(configs) == law]
            session.complete(own, mode, Viewer())
    lines = from_rank_0(
        session.world.comm,
        lambda: [[line.index, line.sample, line.token_ids] for line in session.folder.lines] if session.folder else [],
    )
    whole = {(request.index, request.sample): request for request in session.with_answers(requests, mode)}
    return [
        FinishedText(
            prompt_ids=whole[index, sample].prompt_ids,
            token_ids=tuple(ids),
            index=index,
            sample=sample,
            law=sample % len(configs),
            category=whole[index, sample].source.category or "",
        )
        for index, sample, ids in sorted(lines)
        if len(ids) > 1
    ]


def _loaded(
    session: Session, configs: Sequence[RunConfig]
) -> tuple[dict[str, tuple[Models, DrafterConfig]], dict[str, Source | None]]:
    """Load the models of each draft, which share the target in memory; returns them with the sources of weights."""
    config, first = session.config, session.models
    own, *others = drafts_of(config).items()
    found = {own[0]: (first, own[1])}
    sources: dict[str, Source | None] = {own[0]: first.sources[1] if own[1].model else None}
    for name, draft in others:
        of_draft = replace(configs[0], draft=draft)
        _, sources[name] = find_sources(of_draft, session.world)
        with session.terminal.loading() as progress:
            found[name] = with_draft(first, of_draft, session.world, sources[name], progress=progress), draft
    return found, sources


def _spec_of(session: Session, config: RunConfig) -> PlanSpec:
    """The spec of a run with another draft than this run's."""
    assert session.plan
    plan = session.plan
    return make_spec(
        config,
        world_size=session.world.comm.size,
        device=plan.spec.device,
        prompt_tokens=plan.spec.prompt_tokens,
        num_gpus=plan.hardware.num_gpus,
    )


def _require_room(session: Session, configs: Sequence[RunConfig]) -> None:
    """Raise CapacityError if the drafts do not fit beside one another."""
    plan = session.plan
    assert plan
    _, *others = drafts_of(session.config).values()
    of_drafts = [memory(_spec_of(session, replace(configs[0], draft=draft)), plan.hardware) for draft in others]
    for rank, *more in zip(plan.ranks, *of_drafts, strict=True):
        needed = rank.needed_bytes + sum(one.draft_weights_bytes + one.draft_cache_bytes for one in more)
        if needed > rank.capacity_bytes:
            raise CapacityError(
                f"rank {rank.rank} needs {needed / 2**30:.1f} GiB for target and {1 + len(others)} drafts at once, of "
                f"{rank.capacity_bytes / 2**30:.1f}: give fewer of task.drafts, and read the same texts with the others"
            )


def _batches(texts: Sequence[FinishedText], *, num_rows: int, context: int) -> Iterator[list[int]]:
    """Divide texts, by number, into batches of one law and of similar lengths, which the context holds together."""
    order = sorted(range(len(texts)), key=lambda number: (texts[number].law, -len(texts[number].token_ids)))
    batch: list[int] = []
    for number in order:
        both = [texts[one] for one in (*batch, number)]
        longest = max(len(text.prompt_ids) for text in both) + max(len(text.token_ids) for text in both)
        if batch and (len(batch) == num_rows or both[0].law != both[-1].law or longest > context):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _read(
    session: Session,
    configs: Sequence[RunConfig],
    drafts: Mapping[str, tuple[Models, DrafterConfig]],
    texts: Sequence[FinishedText],
    about: dict[str, Any],
) -> None:
    """Read all texts that no part has yet, a batch on each replica at a time, and write the parts on rank 0."""
    config, mesh, comm = session.config, session.models.mesh, session.world.comm
    folder = session.folder and session.folder.path / PARTS
    longest, num_replicas = cast("AcceptanceConfig", config.task).longest, config.placement.num_replicas
    batches = [*_batches(texts, num_rows=config.batch_size, context=session.models.context)]
    known = {*from_rank_0(comm, lambda: _known_parts(session, about["texts"]))}
    todo = [number for number in range(len(batches)) if number not in known]
    readers: dict[int, Reader] = {}
    is_reporting, turns = mesh.replica.rank == mesh.layout.verify_rank, iter(todo)
    num_done = len(known)
    with session.terminal.measuring() as show:
        while some := [*islice(turns, num_replicas)]:
            if any(comm.gather_text("stop" if session.stop_request.requested else "")):
                raise InterruptedRun.in_folder(config.run_dir)
            sent = ""
            if mesh.number < len(some):
                batch = [texts[number] for number in batches[some[mesh.number]]]
                law = batch[0].law
                if law not in readers:
                    readers[law] = Reader(configs[law], drafts, longest=longest, trees=trees_of(config))
                found = readers[law].read(batch)
                if is_reporting:
                    for name, width in readers[law].widths.items():
                        about["drafts"][name]["width"] = width
                    content = Trace(about, _arrays(batch, found)).to_bytes()
                    sent = f"{some[mesh.number]}:{base64.b64encode(content).decode()}"
            sent_by_all = comm.gather_text(sent)
            parts = [text.split(":") for text in sent_by_all if text and folder]
            with raise_on_all_ranks(comm):
                for number, part in parts:
                    _write(cast("Path", folder) / f"{int(number):06d}.npz", base64.b64decode(part))
            num_done += len(some)
            show("texts read", sum(map(len, batches[:num_done])), len(texts))


def _digest(texts: Sequence[FinishedText]) -> str:
    """A digest that tells these texts from others."""
    return sha256(repr([tuple(asdict(text).values()) for text in texts]).encode()).hexdigest()[:16]


def _known_parts(session: Session, digest: str) -> list[int]:
    """The batches that an earlier part of this run has read; raises ConfigError if it has read other texts."""
    folder = session.folder.path / PARTS if session.folder else None
    if folder is None or not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if re.fullmatch(r"\d{6}\.npz", file.name))
    asked = f"run_dir={session.config.run_dir}"
    if files and Trace.read(files[0], asked=asked).about["texts"] != digest:
        raise ConfigError(f"{asked} has readings of other texts: give the old ones, or name another run_dir")
    return [int(file.stem) for file in files]


def _arrays(texts: Sequence[FinishedText], found: Found) -> dict[str, Any]:
    """The arrays of a part: texts, and their tokens one after the other."""
    lengths = [len(text.token_ids) for text in texts]
    arrays: dict[str, Any] = {
        "text_index": np.array([text.index for text in texts], dtype=np.int64),
        "text_sample": np.array([text.sample for text in texts], dtype=np.int64),
        "text_law": np.array([text.law for text in texts], dtype=np.int16),
        "text_length": np.array(lengths, dtype=np.int32),
        "text_category": np.array([text.category for text in texts], dtype=np.str_),
        "token_id": np.array([token for text in texts for token in text.token_ids], dtype=np.int32),
    }
    for name, values in found.items():
        rows = [row[:length] for row, length in zip(values.numpy(), lengths, strict=True)]
        arrays[name] = np.concatenate(rows).astype(np.int32 if name.endswith(PROPOSED) else np.float32)
    return arrays


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically; raises SspError if the disk fails."""
    try:
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(".tmp")
        with draft.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)
    except OSError as error:
        remedy = "free some space and resume" if error.errno in FULL_DISK else "name a run_dir that can be written"
        raise SspError(f"cannot write {file} ({error.strerror}): {remedy}") from error


def _answer(session: Session, configs: Sequence[RunConfig], sources: Mapping[str, Source | None]) -> None:
    """Join the parts, check that the target can have made the texts, and write the trace and its rows."""
    folder, config, task = session.folder, session.config, cast("AcceptanceConfig", session.config.task)
    assert folder
    files = sorted((folder.path / PARTS).glob("*.npz"))
    trace = Trace.joined([Trace.read(file, asked=f"run_dir={config.run_dir}") for file in files])
    for law in range(len(configs)) if task.texts else ():
        check_likely(trace, law, asked=f"task.texts={task.texts}")
    _write(folder.path / TRACE_FILE, trace.to_bytes())
    for name in trace.drafts if task.store else ():
        file = stored_file(config.model.name, name)
        with suppress(OSError):  # writing says why
            file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, trace.to_bytes())
        session.terminal.say(f"stored in {file}: plans of {config.model.name} with {name} now take it")
    costs, of_trees, lengths, chooser = {}, {}, {}, finder()
    if plan := session.plan:
        for name, draft in drafts_of(config).items():
            chains = with_number_formats(in_rounds(configs[0], draft), (session.models.sources[0], sources[name]))
            longest = trace.most_drafted(name) or task.longest
            costs[name] = costs_of(CostModel(_spec_of(session, chains), plan.hardware), longest)
            for tree in trace.trees(name).values():
                model = CostModel(_spec_of(session, in_rounds(chains, chains.draft, tree.text)), plan.hardware)
                of_trees[name, tree.text] = model.drafting_s(tree.num_nodes) + model.verify_s(tree.num_nodes)
            lengths[name] = chooser.lengths(draft.model.shape if draft.model else None) if chooser else ()
    finished = {row.key for row in folder.results}
    decode = TextAfter(session.models.tokenizer, (), names_special=True).decode
    auto = None
    if chooser and chooser.simulate:
        make = imported(chooser.simulate, setting=f"speculation.num_draft_tokens={chooser.name}")
        auto = partial(auto_seconds, make=make, lengths=lengths, num_texts=NUM_SIMULATED)
    for row in rows_of(trace, costs, of_trees, decode=decode, auto=auto):
        if row.key not in finished:
            folder.append_result(row)


def costs_of(model: CostModel, longest: int) -> dict[int, float]:
    """Return the seconds of a round by K, for K from 1 to `longest`; key 0 has the seconds of a plain step."""
    rounds = {number: model.drafting_s(number) + model.verify_s(number) for number in range(1, longest + 1)}
    return {0: model.plain_s()} | rounds


def check_likely(trace: Trace, law: int, *, asked: str) -> None:
    """Raise ConfigError for texts that the target would not write with a law."""
    temperature = trace.temperatures[law]
    said = f"{asked} are not the target's texts at temperature {temperature:g}"
    impossible, apart = trace.unlikely(law)
    if impossible > _MOST_IMPOSSIBLE:
        raise ConfigError(
            f"{said}: it never writes {impossible:.2%} of their tokens; give their target and sampling settings"
        )
    if abs(apart) > _MOST_APART:
        direction = "less" if apart > 0 else "more"
        raise ConfigError(
            f"{said}: they are {direction} probable than its own by {abs(apart):.0f} standard deviations; give their "
            "target and sampling settings"
        )
