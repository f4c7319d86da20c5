"""A library for `benchmarks.by_format` that yields two tokens a round, prints, and fails on a form that it lacks."""

import sys
from collections.abc import Sequence

from benchmarks.by_format.serving import Completed, serve


class Counting:
    """See `Library`."""

    def load(self, *, form: str, folders: Sequence[str], converted: str, num_threads: int) -> str:
        """See `Library`."""
        sys.stdout.write(f"loading {form} of {len(folders)} for {num_threads} below {converted}\n")
        sys.stdout.flush()
        if form == "ends":
            sys.exit("no memory left")
        if form == "fails":
            raise ValueError("no such form")
        return "counting 1.0"

    def complete(
        self, prompt_ids: Sequence[int], *, form: str, num_new_tokens: int, num_draft_tokens: int | None,
        temperature: float, seed: int,
    ) -> Completed:  # fmt: skip
        """See `Library`."""
        sys.stdout.write(f"completing {len(prompt_ids)} in {form} at {temperature} with {seed}\n")
        sys.stdout.flush()
        rounds = (num_new_tokens - 1) // (1 if num_draft_tokens is None else 2)
        return Completed(num_tokens=num_new_tokens, num_rounds=rounds)


if __name__ == "__main__":
    serve(Counting())
