"""`task=generate` with OpenAI's batch file as `prompts`: answers each line as the server would, in a file like theirs.

The decoder is the server's, with an inbox that rank 0 has filled. A resumed run answers the lines without an answer.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any
from uuid import uuid4

import torch

from llama_ssp.errors import ConfigError, InterruptedRun
from llama_ssp.extensions.serve.inbox import ENDED, Inbox, Part, RequestError
from llama_ssp.extensions.serve.protocol import Asked, BodyReader
from llama_ssp.extensions.serve.records import BATCH, batch_lines, content_of
from llama_ssp.extensions.serve.service import Service, check_layout
from llama_ssp.ranks.failures import from_rank_0, raise_on_all_ranks
from llama_ssp.reports.folder import RunFolder
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session

_IS_CHAT = {"/v1/completions": False, "/v1/chat/completions": True}


class _Batch:
    """The batch on rank 0: puts its lines into an inbox, and writes their answers into the run folder.

    Attributes:
        length: the tokens of the longest completion with its prompt; 0 if nothing is left to decode.
        num_left, num_wrong: lines without an answer, and lines that this run answers by an error.

    Raises ConfigError if the folder has answers to other lines.
    """

    def __init__(self, session: Session, folder: RunFolder, inbox: Inbox) -> None:
        config, models = session.config, session.models
        self._folder, self._show, self.length, self.num_wrong = folder, session.terminal.line, 0, 0
        reader = BodyReader(config, models.request_maker, length=models.context, eos_ids=models.eos_ids)
        lines = batch_lines(config)
        ids = [f"batch_req_{sha256(f'{number} {line}'.encode()).hexdigest()[:24]}" for number, line in enumerate(lines)]
        done, seen = self._done({*ids}), set[str | None]()
        self.num_left = len(lines) - len(done)
        for number, (line, name) in enumerate(zip(lines, ids, strict=True)):
            content = content_of(line)
            custom_id = content.get("custom_id")
            head = {"id": name, "custom_id": custom_id if isinstance(custom_id, str) else None}
            if name not in done:
                try:
                    asked = _read(reader, content, seed=config.seed + number, seen=seen)
                except RequestError as error:
                    self.num_wrong += 1
                    self._write(head, error.status, error.body())
                else:
                    lengths = (len(one.prompt_ids) + one.max_new_tokens for one in asked.completions)
                    self.length = max(self.length, *lengths, 2)
                    inbox.put(asked.completions, partial(self._take, head, asked))
            seen.add(head["custom_id"])

    def _done(self, ids: set[str]) -> set[str]:
        """Return the lines that an earlier part of this run has answered; deletes a half-written answer."""
        file, kept = self._folder.path / BATCH.output, self._folder.read_kept(BATCH.output) or ""
        *answers, torn = kept.split("\n")
        if torn:
            self._folder.write_kept(BATCH.output, kept.removesuffix(torn))
        done = {str(content_of(answer).get("id")) for answer in answers}
        if not done <= ids:
            raise ConfigError(
                f"{file} has answers to other lines: give the old ones (more may follow them), or name another run_dir"
            )
        return done

    def _take(self, head: Mapping[str, Any], asked: Asked, place: int, part: Part) -> None:
        if part.error and part.error.code == ENDED:
            return
        asked.answers[place].push(part)
        ended = [answer.last for answer in asked.answers if answer.last]
        if len(ended) == len(asked.answers):
            if error := next((part.error for part in ended if part.error), None):
                self.num_wrong += 1
            self._write(head, *((error.status, error.body()) if error else (200, asked.whole())))

    def _write(self, head: Mapping[str, Any], status: int, body: Mapping[str, Any]) -> None:
        response = {"status_code": status, "request_id": uuid4().hex, "body": body}
        answer = json.dumps({**head, "response": response, "error": None})
        self._folder.append_kept(BATCH.output, f"{answer}\n")
        self._show(answer)
        self.num_left -= 1


def _read(reader: BodyReader, content: Mapping[str, Any], *, seed: int, seen: set[str | None]) -> Asked:
    """Read the request of a line, which has this seed if it names none; raises RequestError."""
    custom_id, url, body = content.get("custom_id"), content.get("url"), content.get("body")
    if not isinstance(custom_id, str) or custom_id in seen:
        raise RequestError(
            "a line must be a JSON object with a custom_id, a text that no earlier line has", param="custom_id"
        )
    if content.get("method") != "POST" or url not in [*_IS_CHAT]:
        raise RequestError(f"a line needs the method POST and one of the URLs {', '.join(_IS_CHAT)}", param="url")
    if isinstance(body, dict):
        if body.get("stream"):
            raise RequestError("answers of a batch are whole: leave stream out", param="stream")
        body = body if body.get("seed") is not None else {**body, "seed": seed}
    return reader.read(body, is_chat=_IS_CHAT[url])


@torch.inference_mode()
def complete_batch(session: Session, _requests: list[PromptRequest]) -> None:
    """Answer the lines that have no answer yet; raises InterruptedRun on every rank if a signal came before."""
    comm, inbox, batch = session.world.comm, None, None
    check_layout(session, "a batch file")
    with raise_on_all_ranks(comm):
        if session.folder:
            inbox = Inbox(sys.maxsize)
            batch = _Batch(session, session.folder, inbox)
            inbox.close()
    if length := from_rank_0(comm, lambda: batch and batch.length):
        Service(session, inbox, length=length).run()
    if from_rank_0(comm, lambda: batch and batch.num_left):
        raise InterruptedRun.in_folder(session.config.run_dir)
    if session.folder and batch:
        wrong = f", {batch.num_wrong} of them errors" if batch.num_wrong else ""
        session.terminal.say(f"the answers are in {session.folder.path / BATCH.output}{wrong}")
