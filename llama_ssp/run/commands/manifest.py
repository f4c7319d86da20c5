"""Writes the hashes of a checkpoint's files, which `model.verify=true` compares with the files before a run.

    llama-ssp manifest DIR                  # writes DIR/sha256.json
    llama-ssp manifest DIR --output=FILE    # elsewhere; model.manifest=FILE then names it

Run it while the files are known to be good. It hashes every file below DIR except hidden ones, with SHA-256. Exit code:
0, or 2 if the folder cannot be read or the manifest cannot be written.
"""

import argparse
from pathlib import Path

from llama_ssp.run.commands import program
from llama_ssp.weights.hashes import MANIFEST_FILE, write_manifest


def main(arguments: list[str]) -> int:
    """Write the manifest; returns the exit code."""
    parser = program.Options("llama-ssp manifest DIR [--output=FILE]", __doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of one checkpoint")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"the manifest (default: DIR/{MANIFEST_FILE})")
    return program.act_on(parser, arguments, _write)


def _write(given: argparse.Namespace) -> str:
    file = given.output or given.folder / MANIFEST_FILE
    return f"wrote {file}: {write_manifest(given.folder, file)} files"
