"""Writes the hashes of a checkpoint's files, against which `model.verify=true` checks them before a run.

    python launch/manifest.py DIR                  # writes DIR/sha256.json
    python launch/manifest.py DIR --output=FILE    # elsewhere, which model.manifest=FILE then names

Call it where the files are known to be good. Every file below DIR is hashed with SHA-256, but for hidden ones. Exit
code: 0, or 2 where the folder cannot be read or the manifest not written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.models.manifest import MANIFEST_FILE, write_manifest

OUTPUT = "--output="


def main(arguments: list[str]) -> int:
    """Write the manifest; returns the exit code."""
    if any(argument in {"-h", "--help"} for argument in arguments):
        print(__doc__)
        return 0
    try:
        print(_write(arguments))
    except SspError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _write(arguments: list[str]) -> str:
    folders = [Path(argument) for argument in arguments if not argument.startswith("--")]
    options = [argument for argument in arguments if argument.startswith("--")]
    if unknown := [option for option in options if not option.startswith(OUTPUT)]:
        raise ConfigError(f"unknown option {unknown[0]}: there is {OUTPUT}FILE")
    if len(folders) != 1:
        raise ConfigError(f"{len(folders)} folders given: name the folder of one checkpoint")
    file = Path(options[-1].removeprefix(OUTPUT)) if options else folders[0] / MANIFEST_FILE
    return f"wrote {file}: {write_manifest(folders[0], file)} files"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
