"""Writes the hashes of a checkpoint's files, against which `model.verify=true` checks them before a run.

    python launch/manifest.py DIR                  # writes DIR/sha256.json
    python launch/manifest.py DIR --output=FILE    # elsewhere, which model.manifest=FILE then names

Call it where the files are known to be good. Every file below DIR is hashed with SHA-256, but for hidden ones. Exit
code: 0, or 2 where the folder cannot be read or the manifest not written.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch import options
from llama_ssp.weights.manifest import MANIFEST_FILE, write_manifest


def main(arguments: list[str]) -> int:
    """Write the manifest; returns the exit code."""
    parser = options.Options("python launch/manifest.py DIR [--output=FILE]", __doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="of one checkpoint")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"for the hashes (default: DIR/{MANIFEST_FILE})")
    return options.run(parser, arguments, _write)


def _write(given: argparse.Namespace) -> str:
    file = given.output or given.folder / MANIFEST_FILE
    return f"wrote {file}: {write_manifest(given.folder, file)} files"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
