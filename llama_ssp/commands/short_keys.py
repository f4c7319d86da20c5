"""Completes keys of the command line: a setting of the chosen task needs no `task.`, and takes the task's name instead.

In `task=latency`, `num_warmup=2` and `latency.num_warmup=2` are `task.num_warmup=2`. `command_line` checks the result.
"""

from collections.abc import Iterable

from llama_ssp.commands.command_line import chosen_tasks, groups_of, keys_of_run, keys_of_task, parsed_override


class ShortKeys:
    """The keys that can be shortened, for the overrides of one command line."""

    def __init__(self, overrides: Iterable[str]) -> None:
        parsed = [override for override in map(parsed_override, overrides) if override]
        groups = groups_of()
        tasks = chosen_tasks(parsed, groups)
        self._settled = keys_of_run(parsed, groups).union(groups)
        self._own = {key for task in tasks for key in keys_of_task(task)}
        self._names = [f"{task.name}." for task in tasks]

    def complete(self, word: str) -> str:
        """Return a setting with its full key; settings and groups of the run, and unknown ones, stay as they are."""
        key, sign, value = word.partition("=")
        if not sign or key in self._settled:
            return word
        prefix = next((name for name in self._names if key.startswith(name)), "")
        full_key = f"task.{key.removeprefix(prefix)}"
        return f"{full_key}={value}" if full_key in self._own else word
