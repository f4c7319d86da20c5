"""Checks whether a run may go on in its folder: compares the contents with its models, prompts and settings."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from llama_ssp.errors import ConfigError
from llama_ssp.reports import reading
from llama_ssp.reports.folder import MODELS_FILE, RunFolder
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.run.checkpoints import Source
from llama_ssp.run.prompts import EXCERPT, Message, Prompt
from llama_ssp.run.requests import RequestMaker, ids_of
from llama_ssp.settings.drafters import drafts
from llama_ssp.settings.schema import Resume, RunConfig
from llama_ssp.settings.tasks import REQUEST_FILES, task_of
from llama_ssp.text.detokenize import TextAfter
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.hashes import fingerprint, hashed

_WAY_ON = "name another run_dir, or give resume=anyway to go on with texts of both"


@dataclass(frozen=True, kw_only=True)
class _Files:
    """The fingerprints of a model's files by name; see `hashes.fingerprint`."""

    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Models:
    """The content of `models.json`; a run folder without it is of an earlier version with other random numbers."""

    target: _Files
    draft: _Files | None


def check_models(folder: RunFolder, sources: tuple[Source, Source | None], config: RunConfig) -> None:
    """Compare the models' files with those that the folder records; record them in a folder without completions.

    Raises ConfigError if they differ. With resume=anyway, nothing is compared, and the new ones are recorded.
    """
    target, draft = sources
    now = _Models(target=_files_of(target, config), draft=_files_of(draft, config) if draft else None)
    has_answers = any(folder.read_kept(kind.output) for kind in REQUEST_FILES.all().values())
    if (folder.lines or folder.results or has_answers) and config.resume is not Resume.anyway:
        kept = folder.read_kept(MODELS_FILE)
        if kept is None:
            raise ConfigError(
                f"run_dir={folder.path} was begun by an earlier version, which drew other random numbers and did not "
                f"record the models' files: {_WAY_ON}"
            )
        try:
            before = reading.restore(_Models, reading.read_json(kept))
        except ValueError as error:
            raise ConfigError(f"{folder.path / MODELS_FILE} is damaged ({error}): restore it, or {_WAY_ON}") from None
        if differences := [*_differences(before, now, config)]:
            raise ConfigError(
                f"run_dir={folder.path} holds completions of other files ({summary(differences)}): give the old files "
                f"to resume it, {_WAY_ON}"
            )
        return
    folder.write_kept(MODELS_FILE, json.dumps(asdict(now), indent=1) + "\n")


def _files_of(source: Source, config: RunConfig) -> _Files:
    files = fingerprint(source.origin.folder)
    for change, folder in hub.resolve_changes(source.entry) if config.reads_files else ():
        files |= hashed(folder, [change.config], [change.weights])
    return _Files(files=files)


def _differences(before: _Models, now: _Models, config: RunConfig) -> Iterator[str]:
    drafted = config.draft.model
    for words, old, new in (
        (f"model={config.model.name}", before.target, now.target),
        (f"draft={drafted.name if drafted else None}", before.draft, now.draft),
    ):
        if old is None or new is None:  # the settings, which are the same, say whether there is a draft
            continue
        for name in sorted(old.files.keys() | new.files.keys()):
            if old.files.get(name) == new.files.get(name):
                continue
            is_new, is_gone = name not in old.files, name not in new.files
            yield f"{name} of {words} {'is new' if is_new else 'is missing' if is_gone else 'differs'}"


def check_lines(lines: Sequence[CompletionLine], config: RunConfig, prompts: Sequence[Prompt] | None) -> None:
    """Raise ConfigError for recorded completions that this run does not have; new prompts may follow the finished ones.

    `prompts` is None if prompts are typed.
    """
    drafted = drafts(config.draft)
    modes = [PLAIN, SPECULATIVE] if drafted and task_of(config).has_both_modes else [SPECULATIVE if drafted else PLAIN]
    strays = [_named(line) for line in lines if line.sample >= config.num_samples or line.mode not in modes]
    if strays:
        raise ConfigError(
            f"run.jsonl of run_dir={config.run_dir} holds {summary(strays)}, and this run makes {' and '.join(modes)} "
            f"completions with num_samples={config.num_samples}: remove the lines of others, or name another run_dir"
        )
    if prompts is None:
        return
    for line in sorted(lines, key=lambda line: line.index):
        prompt = prompts[line.index] if line.index < len(prompts) else None
        last = prompt.last_message if prompt else None
        new = _whole(prompt.messages, last, prompt.text) if prompt else None
        old = _whole(line.messages, line.last_message or last, line.prompt)  # earlier versions did not record it
        if prompt and (new, len(prompt.earlier)) == (old, line.turn):
            continue
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new or "", old, strict=False)))
        begin = max(0, num_same - EXCERPT // 2)
        now = f"missing, with {len(prompts)} left" if new is None else repr(new[begin : begin + EXCERPT])
        source = "" if config.prompts is None else f" of prompts={config.prompts}"
        raise ConfigError(
            f"prompt {line.index + 1}{source} was {old[begin : begin + EXCERPT]!r} when "
            f"run_dir={config.run_dir} recorded its completion, and is now {now}; give the old prompts to resume that "
            "run (more may follow them), or name another run_dir"
        )


def check_texts(
    lines: Sequence[CompletionLine], config: RunConfig, prompts: Sequence[Prompt] | None, maker: RequestMaker
) -> None:
    """Raise ConfigError for a completion with an id that the model lacks, or with a text that does not match its ids.

    `prompts` is None if prompts are typed. With resume=anyway, texts may come from another tokenizer.
    """
    if config.resume is Resume.anyway:
        return
    texts, known = {line.key: line.text for line in lines}, dict[tuple[int, ...], TextAfter]()
    for line in lines:
        prompt = Prompt(text=line.prompt) if prompts is None else prompts[line.index]
        earlier = [(index, line.mode, line.sample) for index in range(line.index - len(prompt.earlier), line.index)]
        if not texts.keys() >= {*earlier}:
            continue  # they are made again, and the context of this one is not known before
        fault = ""
        if outside := [token for token in line.token_ids if token >= maker.vocab_size]:
            fault = f"has token id {outside[0]}, and the model knows {maker.vocab_size} ids"
        else:
            ids = ids_of(prompt, maker.tokenizer, config, answers=[texts[key] for key in earlier])
            after = known[ids] = known.get(ids) or TextAfter(maker.tokenizer, ids)
            if after.decode(line.token_ids) != line.text:
                fault = "has a text that is not that of its token_ids"
        if fault:
            raise ConfigError(
                f"{_named(line)} in run.jsonl of run_dir={config.run_dir} {fault}; remove such a line to have its "
                "completion made again, or name another run_dir"
            )


def _named(line: CompletionLine) -> str:
    return f"prompt {line.index + 1} sample {line.sample + 1} ({line.mode})"


def _whole(messages: Sequence[Message] | None, last: Message | None, text: str) -> str:
    """Return a text of all that a chat template reads of a prompt, to compare it with another prompt's."""
    return text if messages is None else json.dumps([*messages, {**(last or {}), "content": text}], ensure_ascii=False)
